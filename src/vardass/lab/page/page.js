// Tables, filters and downloads. Text from files is only ever set as textContent or as an attribute.
const data = JSON.parse(document.getElementById('data').textContent);
const byId = (id) => document.getElementById(id);
const downloads = {};

for (const part of document.querySelectorAll('.needs-script')) part.hidden = false;

function make(tag, attributes, ...children) {
  const svg = ['svg', 'path', 'line', 'circle', 'rect', 'text', 'g', 'title'].includes(tag);
  const element = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const unique = (values) => [...new Set(values)];

function shortNumber(value) {
  if (value === null || value === undefined) return '–';
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

// --- downloads ----------------------------------------------------------------------------------------

// A text that a spreadsheet would take for a formula is made a plain text by an apostrophe.
function csvCell(value) {
  if (value === null || value === undefined) return '';
  if (typeof value === 'number') return String(value);
  let text = String(value);
  if (/^[\s]*[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csvText = (rows) => rows.map((row) => row.map(csvCell).join(',')).join('\r\n') + '\r\n';

for (const button of document.querySelectorAll('button.download')) {
  button.addEventListener('click', () => {
    const text = csvText(downloads[button.dataset.download]());
    const address = URL.createObjectURL(new Blob(['\ufeff', text], { type: 'text/csv;charset=utf-8' }));
    const link = make('a', { href: address, download: button.dataset.file });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(address), 10000);
  });
}

// --- the summary table --------------------------------------------------------------------------------

const table = byId('summary-table');
if (table) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const collator = new Intl.Collator('en', { numeric: true, sensitivity: 'base' });
  const place = new Map(rows.map((row, index) => [row, index]));
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
  const filters = { data: byId('filter-data'), algorithm: byId('filter-algorithm'), sampler: byId('filter-sampler') };
  const search = byId('filter-text');

  const numeric = (cell) => cell.dataset.value !== undefined;
  const numberOf = (cell) => (cell.dataset.value === '' ? null : Number(cell.dataset.value));

  const compare = (column, direction) => (one, other) => {
    const [a, b] = [one.cells[column], other.cells[column]];
    let order;
    if (numeric(a)) {
      const [x, y] = [numberOf(a), numberOf(b)];
      if (x === null || y === null) order = (x === null) - (y === null); // unknown ones stay last
      else order = direction * (x - y);
    } else {
      order = direction * collator.compare(a.textContent, b.textContent);
    }
    return order || place.get(one) - place.get(other);
  };

  heads.forEach((head, column) => {
    head.firstElementChild.addEventListener('click', () => {
      const before = head.getAttribute('aria-sort');
      // numbers start with the greatest, names with the first
      const first = head.classList.contains('number') ? 'descending' : 'ascending';
      const second = first === 'ascending' ? 'descending' : 'ascending';
      const now = before === first ? second : first;
      for (const other of heads) other.setAttribute('aria-sort', 'none');
      head.setAttribute('aria-sort', now);
      body.append(...rows.sort(compare(column, now === 'ascending' ? 1 : -1)));
    });
  });

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const fits = Object.entries(filters).every(
        ([name, select]) => select.selectedIndex === 0 || row.dataset[name] === select.value);
      row.hidden = !(fits && words.every((word) => texts.get(row).includes(word)));
      shown += !row.hidden;
    }
    const count = (value) => value.toLocaleString('en');
    byId('shown').textContent = `${count(shown)} of ${count(rows.length)} rows`;
  };
  if (search) for (const control of [...Object.values(filters), search]) control.addEventListener('input', filter);

  downloads.summary = () => {
    const header = heads.flatMap((head) => {
      const name = head.dataset.unit ? `${head.textContent}, ${head.dataset.unit}` : head.textContent;
      return head.dataset.error ? [name, `${name}, standard error`] : [name];
    });
    const lines = rows.filter((row) => !row.hidden).map((row) => [...row.cells].flatMap((cell, column) => {
      if (!numeric(cell)) return [cell.textContent];
      const error = cell.dataset.error ? Number(cell.dataset.error) : null;
      return heads[column].dataset.error ? [numberOf(cell), error] : [numberOf(cell)];
    }));
    return [header, ...lines];
  };
}
