/** The page's own elements. */

/**
 * @param {string} id
 * @returns {any} the element: index.html says of what kind it is
 */
export const $ = (id) => document.getElementById(id);

/** @returns {NodeListOf<HTMLInputElement>} what the model can run on */
export const radios = () => document.querySelectorAll("input[name=provider]");

/**
 * Say something to a screen reader; what is seen says it in its own place.
 *
 * @param {string} text
 */
export function announce(text) {
  $("announce").textContent = text;
}
