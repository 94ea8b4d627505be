// Numbers for people.

const count = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** 1,852,544 parameters: "1.9M". */
export const short = (number) => count.format(number);

/** Bytes in decimal units: "1.2 GB". */
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  const value = bytes / 1000 ** power;
  return `${value.toFixed(power && value < 10 ? 1 : 0)} ${units[power]}`;
}

/** Seconds as a duration: "2 h 5 min". */
export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

/** The last part of the path of a run: "runs/my" is "my". */
export const baseName = (path) => path.split("/").at(-1);

/** A path for an address: "runs/my soup" is "runs/my%20soup". */
export const encodePath = (path) => path.split("/").map(encodeURIComponent).join("/");

/** The address of a view for a run or model: `linkTo("runs", "runs/my")`. */
export const linkTo = (view, name) => `#/${view}/${encodePath(name)}`;
