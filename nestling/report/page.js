// Read-outs, table sorting and the theme button. The page is complete without any of it.
(() => {
  "use strict";
  const root = document.documentElement;
  const remembered = { get: () => { try { return localStorage.getItem("nestling-theme"); } catch { return null; } },
                       set: (v) => { try { localStorage.setItem("nestling-theme", v); } catch { /* private window */ } } };
  if (["light", "dark"].includes(remembered.get())) root.dataset.theme = remembered.get();

  const make = (name, parent, kind, text = "") => {
    const element = document.createElement(name);
    element.className = kind;
    element.textContent = text;
    parent.append(element);
    return element;
  };

  const themeButton = () => {
    const system = matchMedia("(prefers-color-scheme: dark)");
    const button = document.getElementById("theme");
    const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
    const show = () => {
      button.textContent = dark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${dark() ? "light" : "dark"} colours`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      remembered.set(root.dataset.theme);
      show();
    });
    system.addEventListener("change", show);
    button.hidden = false;
    show();
  };

  const sortable = (table) => {
    const headings = [...table.querySelectorAll("thead tr:last-child th")];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const falling = heading.getAttribute("aria-sort") ? heading.getAttribute("aria-sort") === "ascending" : heading.classList.contains("n");
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const body = table.tBodies[0];
        const numeric = heading.classList.contains("n");
        const key = (row) => (numeric ? parseFloat(row.cells[column].dataset.value) : row.cells[column].textContent);
        const order = (a, b) => {
          if (numeric && (Number.isNaN(a) || Number.isNaN(b))) return Number.isNaN(a) - Number.isNaN(b);
          const sign = numeric ? a - b : a.localeCompare(b, undefined, { numeric: true });
          return falling ? -sign : sign;
        };
        body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
      });
    });
  };

  const tip = { box: null, place: null };
  const showTip = (event) => {
    const { box } = tip;
    box.hidden = false;
    const left = Math.min(event.clientX + 16, innerWidth - box.offsetWidth - 8);
    const above = event.clientY - box.offsetHeight - 14;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${above > 4 ? above : event.clientY + 18}px`;
  };
  const hideTip = () => { tip.box.hidden = true; };

  // A sheet over the chart takes the pointer, so that the browser's own slow tooltips stay away.
  const sheetOver = (svg) => {
    const holder = make("div", svg.parentNode, "held");
    holder.append(svg);
    const sheet = make("div", holder, "sheet");
    sheet.addEventListener("pointerleave", hideTip);
    return sheet;
  };

  const lineReadOut = (svg) => {
    const series = JSON.parse(svg.dataset.readOut);
    const width = svg.viewBox.baseVal.width;
    const sheet = sheetOver(svg);
    const rule = make("div", sheet, "rule");
    const nearest = (points, x) => points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
    sheet.addEventListener("pointermove", (event) => {
      const frame = sheet.getBoundingClientRect();
      const x = ((event.clientX - frame.left) / frame.width) * width;
      const found = series.map((one) => [one, nearest(one.at, x)]);
      const anchor = nearest(found.map(([, point]) => point), x);
      const near = found.filter(([, point]) => Math.abs(point[0] - anchor[0]) < width / 40).sort((a, b) => a[1][1] - b[1][1]);
      rule.style.left = `${(anchor[0] / width) * 100}%`;
      tip.box.replaceChildren();
      make("strong", tip.box, "", anchor[2]);
      near.forEach(([one, point]) => {
        const line = make("div", tip.box, "");
        make("i", line, one.style);
        make("span", line, "", one.label);
        make("b", line, "", point[3]);
      });
      showTip(event);
    });
  };

  const titleReadOut = (svg) => {
    const sheet = sheetOver(svg);
    sheet.addEventListener("pointermove", (event) => {
      const hit = document.elementsFromPoint(event.clientX, event.clientY).find((element) => element.matches("rect.cell, rect.strip, .points .dot"));
      const title = hit && hit.querySelector("title");
      if (!title) { hideTip(); return; }
      tip.box.replaceChildren(title.textContent);
      showTip(event);
    });
  };

  // The charts' data, row by row: what is saved, and what the pointer is told where cells are many.
  const tableOf = (svg) => svg.dataset.table.split("\n").map((row) => row.split("\t"));

  const historyReadOut = (svg) => {
    const [left, top, wide, tall] = svg.dataset.place.split(" ").map(Number);
    const [names, ...rows] = tableOf(svg);
    const sheet = sheetOver(svg);
    sheet.addEventListener("pointermove", (event) => {
      const frame = sheet.getBoundingClientRect();
      const scale = svg.viewBox.baseVal.width / frame.width;
      const row = rows[Math.floor(((event.clientY - frame.top) * scale - top) / tall)];
      const column = Math.floor(((event.clientX - frame.left) * scale - left) / wide) + 1;
      if (!row || column < 1 || !names[column]) { hideTip(); return; }
      tip.box.replaceChildren();
      make("strong", tip.box, "", `client ${row[0]}, round ${names[column]}`);
      make("div", tip.box, "", row[column] || "not chosen");
      showTip(event);
    });
  };

  document.addEventListener("DOMContentLoaded", () => {
    themeButton();
    tip.box = make("div", document.body, "tip");
    tip.box.hidden = true;
    tip.box.setAttribute("aria-hidden", "true");
    document.querySelectorAll("table.sortable").forEach(sortable);
    document.querySelectorAll("svg[data-read-out]").forEach(lineReadOut);
    document.querySelectorAll("svg.heat:not(.history), svg.points, svg.bands").forEach(titleReadOut);
    document.querySelectorAll("svg.history").forEach(historyReadOut);
    addEventListener("scroll", hideTip, { passive: true });
  });
})();
