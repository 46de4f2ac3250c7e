"""The samplers inside other people's libraries: one module for each, none imported by the rest of the package."""
