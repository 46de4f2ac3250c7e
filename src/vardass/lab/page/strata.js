// Strata on the plane of the first two principal components, and a batch of one sampler.
const { strata } = data;
if (strata) {
  const holder = byId('strata-picture');
  const tabs = byId('strata-tabs');
  const status = byId('strata-status');
  let sampler = strata.samplers[Math.min(1, strata.samplers.length - 1)];
  let turn = 0;
  let chosen = null; // stratum that is pointed at
  const colour = (stratum) => stratum % 8;
  const range = (axis) => {
    const values = strata.points.map((point) => point[axis]);
    return [Math.min(...values), Math.max(...values)];
  };
  const [xs, ys] = [range(0), range(1)];

  const own = () => sampler.strata || strata.strata;

  const tell = () => {
    const batch = sampler.batches[turn];
    const labels = own();
    const hit = new Set(batch.map((row) => labels[row])).size;
    const all = new Set(labels).size;
    let text = `${sampler.name}, batch ${turn + 1} of ${sampler.batches.length}: ${hit} of ${all} strata are represented.`;
    if (chosen !== null) {
      const size = labels.filter((one) => one === chosen).length;
      const drawn = batch.filter((row) => labels[row] === chosen).length;
      text += ` Stratum ${chosen + 1}: ${size} samples, ${drawn} in the batch.`;
    }
    status.textContent = text;
  };

  const drawStrata = () => {
    const width = Math.max(240, holder.clientWidth);
    const height = Math.round(Math.min(520, Math.max(280, width * 0.6)));
    const margin = 24;
    const x = (value) => (margin + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (width - 2 * margin)).toFixed(1);
    const y = (value) => (height - margin - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (height - 2 * margin)).toFixed(1);
    const batch = sampler.batches[turn];
    const labels = own();
    chosen = null;
    const svg = make('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'img',
      'aria-label': `Samples coloured by stratum, with a batch of ${batch.length} drawn by ${sampler.name}` });
    strata.points.forEach(([a, b], row) => {
      svg.append(make('circle', { class: `point f${colour(labels[row])}`, cx: x(a), cy: y(b), r: 2.6, 'data-row': row }));
    });
    batch.forEach((row, i) => {
      const weight = sampler.weights ? sampler.weights[i] : 1 / batch.length;
      const [a, b] = strata.points[row];
      const radius = Math.min(18, 8 * Math.sqrt(weight * batch.length));
      svg.append(make('circle', { class: `picked f${colour(labels[row])}`, cx: x(a), cy: y(b), r: radius.toFixed(1), 'data-row': row }));
    });
    const point = (event) => {
      const row = event.target.getAttribute('data-row');
      const now = row === null ? null : labels[Number(row)];
      if (now === chosen) return;
      chosen = now;
      for (const circle of svg.querySelectorAll('.point')) {
        circle.classList.toggle('dim', chosen !== null && labels[Number(circle.getAttribute('data-row'))] !== chosen);
      }
      tell();
    };
    svg.addEventListener('pointerover', point);
    svg.addEventListener('pointerdown', point);
    svg.addEventListener('pointerleave', point);
    holder.replaceChildren(svg);
    tell();
  };

  const choose = (one) => {
    sampler = one;
    turn = 0;
    for (const button of tabs.children) button.setAttribute('aria-pressed', String(button.dataset.name === one.name));
    drawStrata();
  };
  tabs.replaceChildren(...strata.samplers.map((one) => {
    const button = make('button', { type: 'button', 'data-name': one.name, 'aria-pressed': 'false' }, one.name);
    button.addEventListener('click', () => choose(one));
    return button;
  }));
  byId('next-batch').addEventListener('click', () => {
    turn = (turn + 1) % sampler.batches.length;
    drawStrata();
  });
  downloads.strata = () => {
    const batch = sampler.batches[turn];
    const weights = new Map();
    batch.forEach((row, i) => weights.set(row, (weights.get(row) || 0) + (sampler.weights ? sampler.weights[i] : 1 / batch.length)));
    return [['sample', 'component 1', 'component 2', 'stratum', 'sampler', 'weight in the batch'],
      ...strata.points.map(([a, b], row) => [row, a, b, own()[row] + 1, sampler.name, weights.get(row) || 0])];
  };
  choose(sampler);
  let drawnWidth = window.innerWidth;
  window.addEventListener('resize', () => {
    if (window.innerWidth === drawnWidth) return;
    drawnWidth = window.innerWidth;
    drawStrata();
  });
}
