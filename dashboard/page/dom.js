// Elements and numbers. Text reaches the page as text nodes alone.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "selected" || name === "disabled" || name === "hidden") element[name] = value;
    else if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A number with up to five significant digits.
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-4 && size > 0)) return value.toExponential(3).replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  if (size >= 1e4) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(size >= 1000 ? 5 : 4)));
}

// Ticks of an axis: short.
export function tick(value) {
  if (value === null) return "";
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(4))}G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(4))}M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(4))}k`;
  if (size < 1e-3 && size > 0) return value.toExponential(0);
  return String(Number(value.toPrecision(5)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${(seconds / 86400).toFixed(1)} d`;
}

export function debounce(f, milliseconds) {
  let timer;
  return (...rest) => {
    clearTimeout(timer);
    timer = setTimeout(() => f(...rest), milliseconds);
  };
}

// A choice among runs, if there are several.
export function runSelect(label, names, value, onchange, none) {
  if (names.length < 2 && !none) return null;
  const options = (none ? [["", none]] : []).concat(names.map((name) => [name, name]));
  const select = el("select", { onchange: () => onchange(select.value) },
    options.map(([name, text]) => el("option", { value: name, selected: name === value }, text)));
  return el("label", {}, `${label} `, select);
}
