// Read-outs, charts as files, table sorting, the theme button, and a run that goes on. The page is complete without any of it.
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
      const frame = svg.getBoundingClientRect(); // the sheet is wider where there are few rounds
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

  const { createObjectURL: linkTo, revokeObjectURL: forget } = URL;
  const download = (content, kind, name) => {
    const link = document.createElement("a");
    link.href = linkTo(new Blob([content], { type: kind }));
    link.download = name;
    link.click();
    setTimeout(() => forget(link.href), 1000);
  };

  const csvOf = (svg) => {
    // What begins like a formula would be one for a spreadsheet: numbers are numbers, words get a mark.
    const plain = (value) => (/^[=+@\-\t]/.test(value) && Number.isNaN(Number(value)) ? `'${value}` : value);
    const quoted = (value) => (/[",\n]/.test(value) ? `"${value.replaceAll('"', '""')}"` : value);
    return `${tableOf(svg).map((row) => row.map((value) => quoted(plain(value))).join(",")).join("\n")}\n`;
  };

  // The picture alone has no style sheet: what it says is written to every element.
  const INKED = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-linejoin", "stroke-linecap", "font-family", "font-size", "font-weight", "paint-order"];
  const svgOf = (svg) => {
    const copy = svg.cloneNode(true);
    const drawn = [svg, ...svg.querySelectorAll("*")];
    [copy, ...copy.querySelectorAll("*")].forEach((element, at) => {
      if (["title", "desc"].includes(element.tagName)) return;
      const style = getComputedStyle(drawn[at]);
      INKED.forEach((name) => element.setAttribute(name, style.getPropertyValue(name)));
      element.removeAttribute("class");
    });
    const { width, height } = svg.viewBox.baseVal;
    const back = document.createElementNS(svg.namespaceURI, "rect");
    Object.entries({ width, height, fill: getComputedStyle(root).getPropertyValue("--card").trim() }).forEach(([name, value]) => back.setAttribute(name, value));
    copy.querySelector("desc").after(back);
    [...copy.attributes].filter((one) => one.name.startsWith("data-")).forEach((one) => copy.removeAttribute(one.name));
    Object.entries({ width, height }).forEach(([name, value]) => copy.setAttribute(name, value));
    return new XMLSerializer().serializeToString(copy);
  };

  // Twice as sharp as on the page; a picture wider or higher than MOST is more than a canvas may hold.
  const MOST = 8192;
  const pngOf = (svg) => new Promise((done) => {
    const { width, height } = svg.viewBox.baseVal;
    const scale = Math.min(2, MOST / Math.max(width, height));
    const image = new Image();
    image.addEventListener("load", () => {
      const canvas = document.createElement("canvas");
      Object.assign(canvas, { width: Math.round(width * scale), height: Math.round(height * scale) });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob(done, "image/png");
    });
    image.src = `data:image/svg+xml,${encodeURIComponent(svgOf(svg))}`;
  });

  const saves = (svg) => {
    const plot = svg.closest(".plot") || svg.closest(".held") || svg;
    const line = document.createElement("p");
    line.className = "saves";
    const name = svg.querySelector("title").textContent.replace(/[^\w]+/g, "-").toLowerCase();
    const offer = (word, content, kind) => {
      const button = make("button", line, "", word);
      button.type = "button";
      button.setAttribute("aria-label", `Save ${svg.querySelector("title").textContent} as ${word}`);
      button.addEventListener("click", async () => download(await content(svg), kind, `${name}.${word.toLowerCase()}`));
    };
    make("span", line, "", "Save");
    offer("CSV", csvOf, "text/csv");
    offer("SVG", svgOf, "image/svg+xml");
    offer("PNG", pngOf, "image/png");
    plot.after(line);
  };

  // What scripts add to a part of the page.
  const enliven = (part) => {
    const each = (selector, what) => part.querySelectorAll(selector).forEach(what);
    each("table.sortable", sortable);
    each("svg[data-read-out]", lineReadOut);
    each("svg.heat:not(.history), svg.points, svg.bands", titleReadOut);
    each("svg.history", historyReadOut);
    each("svg.chart[data-table]", saves);
  };

  // A page that its server brings up to date: what has changed is replaced, and nothing else moves.
  const follow = (main) => {
    let stamp = document.body.dataset.live;
    let sources = [...main.children].map((child) => child.outerHTML);
    const badge = make("span", document.querySelector(".brand"), "live", "live");
    const keep = (from, to) => {
      const pairs = (selector) => [...from.querySelectorAll(selector)].map((old, at) => [old, to.querySelectorAll(selector)[at]]).filter(([, now]) => now);
      pairs("details").forEach(([old, now]) => { now.open = old.open; });
      pairs(".scroll").forEach(([old, now]) => { now.scrollLeft = old.scrollLeft; });
    };
    const link = ([ident, name]) => {
      const item = document.createElement("li");
      make("a", item, "", name).href = `#${ident}`;
      return item;
    };
    const show = (news) => {
      const fresh = document.createElement("template");
      fresh.innerHTML = news.body;
      const parts = [...fresh.content.children];
      const now = parts.map((part) => part.outerHTML);
      if (now.length !== sources.length) {
        main.replaceChildren(...parts);
        parts.forEach(enliven);
      } else {
        parts.forEach((part, at) => {
          if (now[at] === sources[at]) return;
          const old = main.children[at];
          old.replaceWith(part);
          enliven(part);
          keep(old, part);
        });
      }
      hideTip();
      sources = now;
      stamp = news.stamp;
      document.title = news.title;
      document.querySelector(".bar nav ul").replaceChildren(...news.sections.map(link));
    };
    const ask = async () => {
      try {
        const answer = await fetch(`/parts?seen=${stamp}`, { cache: "no-store" });
        if (answer.status === 200) show(await answer.json());
        badge.textContent = "live";
      } catch {
        badge.textContent = "not watched any more";
      }
      setTimeout(ask, 2000);
    };
    setTimeout(ask, 1000);
  };

  document.addEventListener("DOMContentLoaded", () => {
    themeButton();
    tip.box = make("div", document.body, "tip");
    tip.box.hidden = true;
    tip.box.setAttribute("aria-hidden", "true");
    const main = document.querySelector("main");
    // before anything is added: what the server sends is compared with what it sent
    if (document.body.dataset.live !== undefined) follow(main);
    enliven(main);
    addEventListener("scroll", hideTip, { passive: true });
  });
})();
