// A click on a heading of a table, or Enter, sorts its rows. The page of a run and the documentation's site have it.
const number = (text) => Number.parseFloat(text.replace(/[^\d.eE-]/g, ""));

const sortable = (table) => {
  const body = table.tBodies[0];
  [...(table.tHead?.rows[0]?.cells ?? [])].forEach((heading, column) => {
    heading.tabIndex = 0;
    heading.classList.add("sorts");
    heading.ariaSort = "none";
    const sort = () => {
      const down = heading.ariaSort === "ascending" ? -1 : 1;
      const rows = [...body.rows].map((row) => [row.cells[column]?.textContent.trim() ?? "", row]);
      const numeric = rows.every(([text]) => text === "" || text === "–" || /^[\d.+−×-]/.test(text));
      // What has no number comes last, whichever way the others go.
      const order = (a, b) => Number.isNaN(a) - Number.isNaN(b) || down * (a - b);
      rows.sort(([a], [b]) => numeric ? order(number(a), number(b)) : down * a.localeCompare(b));
      for (const other of heading.parentElement.cells) other.ariaSort = "none";
      heading.ariaSort = down > 0 ? "ascending" : "descending";
      body.append(...rows.map(([, row]) => row));
    };
    heading.addEventListener("click", sort);
    heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
  });
};
