// Saves a plot or its numbers as a file, and chooses a card by the keyboard as by the mouse.
document.addEventListener('click', (event) => {
  const button = event.target.closest('[data-save]');
  if (!button) return;
  event.stopPropagation();
  const card = button.closest('.card');
  const kind = button.dataset.save;
  const text = card.querySelector('template.numbers').content.textContent;
  let content, type;
  if (kind === 'svg') {
    content = new XMLSerializer().serializeToString(card.querySelector('svg'));
    type = 'image/svg+xml';
  } else if (kind === 'json') {
    content = text;
    type = 'application/json';
  } else {
    // As RFC 4180 has it: a cell with a comma, a quote or any end of a line is quoted.
    const data = JSON.parse(text);
    const cell = (value) => {
      const shown = value === null ? '' : String(value);
      return /[",\r\n]/.test(shown) ? '"' + shown.replaceAll('"', '""') + '"' : shown;
    };
    content = [data.columns, ...data.rows].map((row) => row.map(cell).join(',') + '\r\n').join('');
    type = 'text/csv';
  }
  const link = document.createElement('a');
  link.href = URL.createObjectURL(new Blob([content], { type }));
  link.download = card.dataset.name + '.' + kind;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}, true);
document.addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && event.target.matches('.card[data-choice]')) event.target.click();
});
