// Gains over uniform batches: a dot with its interval for each sampler, a figure for each data set and algorithm.
const { gains, margin } = data; // differences up to the margin hardly matter

const signed = (value) => `${value > 0 ? '+' : ''}${value.toFixed(1)}`.replace('-', '−').replace(/^[+−]0\.0$/, '0.0');

function gainChart(title, rows) {
  const figure = make('figure', {}, make('figcaption', {}, title));
  const holder = make('div', {});
  figure.append(holder);
  // wide enough for dots and errors; an interval of few repeats can be far wider and is cut off
  const ends = rows.flatMap((row) => [row.mean - 2 * (row.stderr || 0), row.mean + 2 * (row.stderr || 0)]);
  const reach = 1.08 * Math.max(2 * margin, ...ends.map(Math.abs));
  function draw() {
    const width = Math.max(240, holder.clientWidth);
    const narrow = width < 400;
    const [gap, left, right, bottom] = [narrow ? 42 : 28, narrow ? 4 : 176, 132, 38];
    const height = rows.length * gap + bottom;
    const x = (value) => left + ((Math.max(-reach, Math.min(reach, value)) + reach) / (2 * reach)) * (width - left - right);
    const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': `${title}: gains over uniform batches; the table has the numbers` });
    svg.append(make('rect', { class: 'region', x: x(-margin), width: x(margin) - x(-margin), y: 0, height: height - bottom }));
    for (const tick of ticks(-reach, reach, Math.max(2, Math.floor((width - left - right) / 60)))) {
      svg.append(make('line', { class: tick === 0 ? 'zero' : 'axis', x1: x(tick), x2: x(tick), y1: 0, y2: height - bottom }),
        make('text', { x: x(tick), y: height - bottom + 17, 'text-anchor': 'middle' }, String(tick).replace('-', '−')));
    }
    svg.append(make('text', { x: (left + width - right) / 2, y: height - 4, 'text-anchor': 'middle' },
      `points over ${rows[0].reference}`));
    rows.forEach((row, index) => {
      const y = index * gap + (narrow ? 28 : gap / 2);
      const name = row.label.length > 25 ? `${row.label.slice(0, 24)}…` : row.label;
      const group = make('g', { class: 'gain' }, make('text', { class: 'strong', x: narrow ? 0 : left - 10, y: narrow ? y - 12 : y + 4,
        'text-anchor': narrow ? 'start' : 'end' }, name));
      const bar = (low, high, kind) => group.append(make('line', { class: `interval s${row.colour} ${kind}`,
        x1: x(low), x2: x(high), y1: y, y2: y }));
      if (row.low !== null) bar(row.low, row.high, '');
      if (row.stderr !== null) bar(row.mean - row.stderr, row.mean + row.stderr, 'error-bar');
      group.append(make('circle', { class: row.mark ? `ring s${row.colour}` : `f${row.colour}`, cx: x(row.mean), cy: y, r: 4.5 }));
      const interval = row.low === null ? '' : `, 95 % interval ${signed(row.low)} to ${signed(row.high)}`;
      const said = row.mark || row.shown;
      group.append(make('title', {}, `${row.label}: ${signed(row.mean)}${interval}, ${said}`),
        make('text', { x: width - right + 10, y: y + 4 }, `${signed(row.mean)} ${said}`));
      svg.append(group);
    });
    holder.replaceChildren(svg);
  }
  return { figure, draw };
}

const gainPanels = byId('gain-panels');
if (gainPanels) {
  let drawn = [];
  const picked = (name, row) => {
    const select = byId(`filter-${name}`);
    return !select || select.selectedIndex === 0 || row[name] === select.value;
  };
  const shownGains = () => gains.filter((row) => picked('data', row) && picked('algorithm', row));
  const drawGains = () => {
    const groups = new Map();
    for (const row of shownGains()) {
      const title = `${row.data}, ${row.algorithm}`;
      groups.set(title, [...(groups.get(title) || []), row]);
    }
    drawn = [...groups].map(([title, rows]) => gainChart(title, rows));
    gainPanels.replaceChildren(...drawn.map((chart) => chart.figure));
    for (const chart of drawn) chart.draw();
  };
  for (const name of ['data', 'algorithm']) byId(`filter-${name}`)?.addEventListener('input', drawGains);
  downloads.gains = () => [['data', 'algorithm', 'sampler', 'over', 'gain', 'standard error', 'low', 'high', 'incomplete', 'shown'],
    ...shownGains().map((row) => [row.data, row.algorithm, row.label, row.reference, row.mean, row.stderr, row.low, row.high, row.mark, row.shown])];
  drawGains();
  let gainWidth = window.innerWidth;
  window.addEventListener('resize', () => {
    if (window.innerWidth === gainWidth) return;
    gainWidth = window.innerWidth;
    for (const chart of drawn) chart.draw();
  });
}
