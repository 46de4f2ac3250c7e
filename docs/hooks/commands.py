"""The list of commands on `cli.md`, made from the program itself."""

from typer.main import get_command

MARK = "<!-- commands -->"


def on_page_markdown(markdown, page, config, files):
    """Put the commands and their options where the page says so."""
    if MARK not in markdown:
        return markdown
    from vardass.cli.app import app

    commands = get_command(app).commands
    return markdown.replace(MARK, "\n\n".join(_section(name, command) for name, command in commands.items()))


def _section(name, command):
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = [p.metavar or p.name.upper() for p in arguments]
    usage = " ".join(["vardass", name, *(w if p.required else f"[{w}]" for p, w in zip(arguments, words))])
    rows = [_row(f"`{word}`", p) for p, word in zip(arguments, words)]
    for panel in dict.fromkeys(getattr(p, "rich_help_panel", None) for p in options):
        rows += [f"| **{panel}** | |"] if panel else []
        rows += [
            _row("<br>".join(f"`{flag}`" for flag in (*p.opts, *p.secondary_opts)), p)
            for p in options
            if getattr(p, "rich_help_panel", None) == panel
        ]
    table = "\n".join(["| option | |", "|---|---|", *rows])
    table = f'<div class="options" markdown>\n\n{table}\n\n</div>'
    if len(rows) > 25:
        table = f'??? note "{len(options)} options"\n\n' + "\n".join(f"    {line}" for line in table.splitlines())
    return f"## {name}\n\n{command.help.strip()}\n\n```text\n{usage} [OPTIONS]\n```\n\n{table}\n\n"


def _row(first, parameter):
    text = (
        " ".join((getattr(parameter, "help", None) or "").split())
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("\\[", "[")
    )
    default = parameter.default
    if default not in (None, False, True, (), []) and not callable(default) and f"{default}" not in text:
        text += f" *Default: {default}.*"
    if parameter.required and parameter.param_type_name == "option":
        text += " *Required.*"
    return f"| {first} | {text} |"
