/**
 * Are a GPU's numbers this bundle's numbers? A few recorded calls are run before anybody is given a vector: drivers
 * differ, and operators that a GPU lacks are mixed with those of the CPU. The self-check runs all of them.
 */

import { GOLDEN_NAME, readGolden } from "./core/golden.mjs";
import { allows, attendedPositions, compare } from "./core/parity.mjs";

const CALLS = 3;

/**
 * @param {import("./core/encoder.mjs").Encoder} encoder
 * @param {import("./core/bundle.mjs").Bundle} bundle
 * @returns {Promise<{passed: boolean, problem: string | null}>} problem: the first output that is not as recorded
 */
export async function trial(encoder, bundle) {
  const { inputs, outputs, tolerance } = bundle.manifest;
  const axes = new Map(outputs.map(({ name, shape }) => [name, shape]));
  const cases = readGolden(await bundle.file(GOLDEN_NAME));
  bundle.release(GOLDEN_NAME);
  for (const each of smallest(cases)) {
    const found = await encoder.run(each.inputs);
    const attended = attendedPositions(inputs, each.inputs);
    for (const [name, expected] of Object.entries(each.outputs)) {
      const comparison = compare(found[name], expected, attended, axes.get(name));
      if (!allows(tolerance, comparison)) {
        const { problem, maxAbs, minCosine } = comparison;
        const numbers = `differs by ${maxAbs.toPrecision(2)}, cosine ${minCosine.toFixed(6)}`;
        return { passed: false, problem: `${name} in ${each.id} ${problem ?? numbers}` };
      }
    }
  }
  return { passed: true, problem: null };
}

/** The smallest calls, of several rows where there are such: rows of unequal length go wrong first. */
function smallest(cases) {
  const size = ({ batch, sequence }) => batch * sequence;
  const sorted = [...cases].sort((one, other) => size(one) - size(other));
  const many = sorted.filter(({ batch, sequence }) => batch > 1 && sequence > 1);
  return [...sorted.slice(0, 1), ...many, ...sorted.slice(1)].slice(0, CALLS);
}
