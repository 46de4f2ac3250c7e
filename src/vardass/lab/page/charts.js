// Curves, variance and time of the selected data, task and algorithm.
const { curves, seconds, parts } = data;
const picks = { data: byId('pick-data'), task: byId('pick-task'), algorithm: byId('pick-algorithm') };
const ALL = 'mean of all tasks';
const hiddenCells = new Set();

function fill(select, values) {
  const before = select.value;
  select.replaceChildren(...values.map((value) => make('option', { value }, value)));
  if (values.includes(before)) select.value = before;
  select.parentElement.hidden = values.length < 2;
}

const swatch = (colour, dash) => {
  const line = make('line', { x1: 0, x2: 22, y1: 5, y2: 5, class: `line s${colour} dash${dash}` });
  return make('svg', { class: 'swatch', viewBox: '0 0 22 10', 'aria-hidden': 'true' }, line);
};

const square = (colour) => make('svg', { class: 'swatch', viewBox: '0 0 22 10', 'aria-hidden': 'true' },
  make('rect', { width: 22, height: 10, rx: 2, class: `p${colour}` }));

// --- numbers ------------------------------------------------------------------------------------------

function at(steps, values, step) {
  if (step < steps[0] || step > steps[steps.length - 1]) return null;
  const right = steps.findIndex((one) => one >= step);
  if (steps[right] === step || right === 0) return values[right];
  const [a, b] = [values[right - 1], values[right]];
  if (a === null || b === null) return null;
  return a + ((b - a) * (step - steps[right - 1])) / (steps[right] - steps[right - 1]);
}

function selected() {
  const task = picks.task.selectedIndex === 0 && picks.task.options.length > 1 ? null : picks.task.value;
  return curves.series.filter((one) => one.data === picks.data.value && (task === null || one.task === task)
    && curves.cells[one.cell].algorithm === picks.algorithm.value);
}

// One line for each cell: mean, least and greatest over its runs at every step.
function lines(value) {
  const found = [];
  for (const cell of unique(selected().map((one) => one.cell))) {
    const runs = selected().filter((one) => one.cell === cell)
      .map((one) => ({ steps: one.steps, values: value(one) })).filter((one) => one.values);
    if (!runs.length) continue;
    const steps = unique(runs.flatMap((run) => run.steps)).sort((a, b) => a - b);
    const points = steps.map((step) => {
      const known = runs.map((run) => at(run.steps, run.values, step)).filter((one) => one !== null);
      if (!known.length) return null;
      return { step, mean: known.reduce((a, b) => a + b) / known.length, low: Math.min(...known), high: Math.max(...known) };
    }).filter(Boolean);
    if (points.length) found.push({ cell, points, runs: runs.length });
  }
  return found.sort((a, b) => a.cell - b.cell).filter((line) => !hiddenCells.has(line.cell));
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * unit).find((one) => one >= raw) || raw;
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) found.push(Number((i * step).toPrecision(12)));
  return found;
}

// 1, 2 and 5 times powers of ten; powers alone if these are too many.
function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const lead of [1, 2, 5]) found.push(Number(`${lead}e${power}`));
  }
  const inside = found.filter((tick) => tick >= low && tick <= high);
  return inside.length > 7 ? inside.filter((tick) => String(tick.toExponential()).startsWith('1e')) : inside;
}

// --- a chart with lines -------------------------------------------------------------------------------

function lineChart(title, drawn, options = {}) {
  const figure = make('figure', {}, make('figcaption', {}, title));
  if (!drawn.length) {
    figure.append(make('p', { class: 'empty' }, 'Nothing was recorded for this selection.'));
    return { figure, draw() {} };
  }
  const holder = make('div', {});
  const list = make('ul', { class: options.long ? 'values long' : 'values', 'aria-live': 'polite' });
  figure.append(holder, list);
  const steps = unique(drawn.flatMap((line) => line.points.map((point) => point.step))).sort((a, b) => a - b);
  let chosen = steps.length - 1;

  function values() {
    const step = steps[chosen];
    list.replaceChildren(make('li', { class: 'where' }, `step ${step.toLocaleString('en')}`), ...drawn.map((line) => {
      const value = at(line.points.map((point) => point.step), line.points.map((point) => point.mean), step);
      const { label, colour, dash } = curves.cells[line.cell];
      const name = line.name ? `${label}, ${line.name}` : label;
      return make('li', {}, swatch(colour, line.dash ?? dash), make('span', { class: 'name', title: name }, name),
        make('span', { class: 'value' }, shortNumber(value)));
    }));
  }

  function draw() {
    const width = Math.max(240, holder.clientWidth);
    const [height, left, right, top, bottom] = [228, 54, 22, 14, 40];
    let low = Math.min(...drawn.flatMap((line) => line.points.map((point) => point.low)));
    let high = Math.max(...drawn.flatMap((line) => line.points.map((point) => point.high)));
    if (options.include !== undefined) [low, high] = [Math.min(low, options.include), Math.max(high, options.include)];
    if (options.fromZero) low = Math.min(0, low);
    if (high === low) [low, high] = [low - Math.abs(low) * 0.05 - 1e-6, high + Math.abs(high) * 0.05 + 1e-6];
    const log = !options.fromZero && options.include === undefined && low > 0 && high / low > 20; // else small values lie on the axis
    const margin = log ? (high / low) ** 0.05 : (high - low) * 0.05;
    if (log) low /= margin;
    else if (!options.fromZero) low -= margin;
    high = log ? high * margin : high + margin;
    const [first, last] = [steps[0], steps[steps.length - 1]];
    const x = (step) => left + (last === first ? 0.5 : (step - first) / (last - first)) * (width - left - right);
    const share = (value) => (log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low));
    const y = (value) => top + (1 - share(value)) * (height - top - bottom);
    const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', tabindex: 0,
      'aria-label': `${title}, by step; arrow keys move along the steps` });
    for (const tick of log ? logTicks(low, high) : ticks(low, high, 4)) {
      svg.append(make('line', { class: 'axis', x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
        make('text', { x: left - 6, y: y(tick) + 4, 'text-anchor': 'end' }, shortNumber(tick)));
    }
    for (const tick of ticks(first, last === first ? first + 1 : last, Math.max(2, Math.floor(width / 90)))) {
      if (tick > last) continue;
      svg.append(make('text', { x: x(tick), y: height - bottom + 18, 'text-anchor': 'middle' }, tick.toLocaleString('en')));
    }
    svg.append(make('text', { x: (left + width - right) / 2, y: height - 6, 'text-anchor': 'middle' }, 'step'));
    if (options.include !== undefined) {
      svg.append(make('line', { class: 'cursor', x1: left, x2: width - right, y1: y(options.include), y2: y(options.include) }),
        make('text', { x: width - right, y: y(options.include) - 5, 'text-anchor': 'end' }, options.includeName));
    }
    const path = (points, key) => points.map((point, i) => `${i ? 'L' : 'M'}${x(point.step).toFixed(1)} ${y(point[key]).toFixed(1)}`).join('');
    for (const line of drawn) {
      const { colour, dash } = curves.cells[line.cell];
      if (line.runs > 1 && !options.noBand && line.points.length > 1) {
        const back = path([...line.points].reverse(), 'low').replace('M', 'L');
        svg.append(make('path', { class: `band f${colour}`, d: `${path(line.points, 'high')}${back}Z` }));
      }
      const style = `line s${colour} dash${line.dash ?? dash}${line.dash ? ' thin' : ''}`;
      svg.append(make('path', { class: style, d: path(line.points, 'mean') }));
      if (line.points.length === 1) {
        svg.append(make('circle', { class: `f${colour}`, cx: x(line.points[0].step), cy: y(line.points[0].mean), r: 3 }));
      }
    }
    const cursor = make('line', { class: 'cursor', y1: top, y2: height - bottom, visibility: 'hidden' });
    svg.append(cursor);
    const show = (index, visible) => {
      chosen = Math.min(steps.length - 1, Math.max(0, index));
      cursor.setAttribute('x1', x(steps[chosen]));
      cursor.setAttribute('x2', x(steps[chosen]));
      cursor.setAttribute('visibility', visible ? 'visible' : 'hidden');
      values();
    };
    const follow = (event) => {
      const place = event.clientX - svg.getBoundingClientRect().left;
      const distances = steps.map((step) => Math.abs(x(step) - place));
      show(distances.indexOf(Math.min(...distances)), true);
    };
    svg.addEventListener('pointermove', follow);
    svg.addEventListener('pointerdown', follow);
    svg.addEventListener('pointerleave', (event) => { if (event.pointerType === 'mouse') show(steps.length - 1, false); });
    svg.addEventListener('keydown', (event) => {
      const moves = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: steps.length - 1 };
      if (!(event.key in moves)) return;
      event.preventDefault();
      show(moves[event.key], true);
    });
    holder.replaceChildren(svg);
    values();
  }
  return { figure, draw };
}

// --- time ---------------------------------------------------------------------------------------------

function timeRows() {
  return seconds.filter((row) => row.data === picks.data.value && row.algorithm === picks.algorithm.value);
}

function timeChart() {
  const rows = timeRows();
  const figure = make('figure', {}, make('figcaption', {}, 'Seconds of a run'));
  if (!rows.length) {
    figure.append(make('p', { class: 'empty' }, 'No times were recorded for this selection.'));
    return { figure, draw() {} };
  }
  const holder = make('div', {});
  const list = make('ul', { class: 'values', 'aria-live': 'polite' });
  figure.append(holder, list);
  const sum = (row) => row.parts.reduce((a, b) => a + b, 0);
  const show = (row) => list.replaceChildren(make('li', { class: 'where' }, row.label), ...parts.map((part, i) => make('li', {},
    square(i), make('span', { class: 'name' }, part), make('span', { class: 'value' }, `${shortNumber(row.parts[i])} s`))));
  function draw() {
    const width = Math.max(240, holder.clientWidth);
    const narrow = width < 520;
    const [gap, bar] = [narrow ? 46 : 32, 18];
    const left = narrow ? 0 : 190;
    const height = rows.length * gap + 4;
    const most = Math.max(...rows.map(sum)) || 1;
    const scale = (width - left - 64) / most;
    const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': 'Seconds of each part of a run; the table below has the numbers' });
    rows.forEach((row, index) => {
      const top = index * gap + (narrow ? 20 : 6);
      const name = row.label.length > 26 ? `${row.label.slice(0, 25)}…` : row.label;
      const group = make('g', {}, make('text', { class: 'strong', x: narrow ? 0 : left - 10, y: narrow ? top - 5 : top + 13,
        'text-anchor': narrow ? 'start' : 'end' }, name));
      let x = left;
      row.parts.forEach((value, i) => {
        const length = value * scale;
        const part = make('rect', { class: `p${i}`, x, y: top, width: Math.max(0, length - 0.75), height: bar });
        part.append(make('title', {}, `${parts[i]} ${shortNumber(value)} s`));
        group.append(part);
        x += length;
      });
      group.append(make('text', { x: x + 6, y: top + 13 }, `${shortNumber(sum(row))} s`));
      group.addEventListener('pointerenter', () => show(row));
      group.addEventListener('pointerdown', () => show(row));
      svg.append(group);
    });
    holder.replaceChildren(svg);
    show(rows[0]);
  }
  return { figure, draw };
}

// --- all of them --------------------------------------------------------------------------------------

let charts = [];

function drawLegend() {
  const cells = unique(selected().map((one) => one.cell)).sort((a, b) => a - b);
  byId('legend').parentElement.hidden = cells.length < 2 && Object.values(picks).every((select) => select.parentElement.hidden);
  byId('legend').replaceChildren(...(cells.length > 1 ? cells : []).map((cell) => {
    const { label, colour, dash } = curves.cells[cell];
    const button = make('button', { type: 'button', 'aria-pressed': String(!hiddenCells.has(cell)) }, swatch(colour, dash), label);
    button.addEventListener('click', () => {
      if (!hiddenCells.delete(cell)) hiddenCells.add(cell);
      button.setAttribute('aria-pressed', String(!hiddenCells.has(cell)));
      drawCharts();
    });
    return button;
  }));
}

const ratio = (one) => one.values['source/variance'] && one.values['source/uniform_variance']
  && one.values['source/variance'].map((value, i) => {
    const uniform = one.values['source/uniform_variance'][i];
    return value === null || !uniform ? null : value / uniform;
  });

function drawCharts() {
  const metrics = curves.metrics.map(({ key, title }) => lineChart(title, lines((one) => one.values[key])));
  const relative = lines(ratio);
  const absolute = [...lines((one) => one.values['source/variance']),
    ...lines((one) => one.values['source/uniform_variance']).map((line) => ({ ...line, name: 'uniform draws', dash: 1 }))];
  const variances = !curves.varied ? [] : [
    lineChart('Relative to uniform draws', relative, { include: 1, includeName: 'uniform draws', fromZero: true }),
    lineChart('Variance, and that of uniform draws (dashed)', absolute, { noBand: true, fromZero: true, long: true }),
  ];
  const times = [timeChart()];
  byId('curve-panels').replaceChildren(...metrics.map((chart) => chart.figure));
  byId('variance-panels')?.replaceChildren(...variances.map((chart) => chart.figure));
  byId('time-bars').replaceChildren(...times.map((chart) => chart.figure));
  charts = [...metrics, ...variances, ...times];
  for (const chart of charts) chart.draw();
}

function update() {
  const known = [...curves.series, ...seconds];
  fill(picks.data, unique(known.map((one) => one.data)));
  const tasks = unique(curves.series.filter((one) => one.data === picks.data.value).map((one) => one.task));
  fill(picks.task, tasks.length > 1 ? [ALL, ...tasks] : tasks);
  const present = curves.series.filter((one) => one.data === picks.data.value).map((one) => curves.cells[one.cell].algorithm);
  const timed = seconds.filter((one) => one.data === picks.data.value).map((one) => one.algorithm);
  // the one with the most to compare comes first
  const count = (name) => unique(curves.series.filter((one) => one.data === picks.data.value
    && curves.cells[one.cell].algorithm === name).map((one) => one.cell)).length;
  fill(picks.algorithm, unique([...present, ...timed]).sort((a, b) => count(b) - count(a)));
  drawLegend();
  drawCharts();
}

const seriesRows = (keys) => [
  ['data', 'task', 'algorithm', 'sampler', 'repeat', 'search', 'run', 'step', ...keys],
  ...selected().filter((one) => !hiddenCells.has(one.cell)).flatMap((one) => one.steps.map((step, i) => [
    one.data, one.task, curves.cells[one.cell].algorithm, curves.cells[one.cell].label, one.repeat, one.search, one.id, step,
    ...keys.map((key) => (one.values[key] ? one.values[key][i] : null)),
  ])),
];
downloads.curves = () => seriesRows(curves.metrics.map((metric) => metric.key));
downloads.variance = () => seriesRows(['source/variance', 'source/uniform_variance']);
downloads.time = () => [['data', 'algorithm', 'sampler', ...parts],
  ...timeRows().map((row) => [row.data, row.algorithm, row.label, ...row.parts])];

if (picks.data) {
  for (const select of Object.values(picks)) select.addEventListener('input', update);
  update();
  let width = window.innerWidth;
  window.addEventListener('resize', () => {
    if (window.innerWidth === width) return; // a phone's address bar changes the height only
    width = window.innerWidth;
    for (const chart of charts) chart.draw();
  });
}
