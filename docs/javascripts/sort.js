// A click on a heading sorts its table, as mkdocs-material documents it.
document$.subscribe(() =>
  document.querySelectorAll("article table:not([class])").forEach((table) => new Tablesort(table)),
);
