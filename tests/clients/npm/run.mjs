// Run the checks of one suite on Node, and print a line of JSON for each: run.py in ../suites for npm packages.
//
//     node run.mjs SUITE URL
//
// A suite is a module beside this one that exports the name of the package it tries (`PACKAGE`) and functions
// `check_...`, each of which gets the pool's URL and throws when a client saw what it should not.

import { readFileSync } from "node:fs";

const ERROR_CHARS_MAX = 600;

function tell(row) {
  process.stdout.write(JSON.stringify(row) + "\n");
}

const [name, url] = process.argv.slice(2);
let suite, version;
try {
  suite = await import(`./${name}.mjs`);
  version = JSON.parse(readFileSync(new URL(`./node_modules/${suite.PACKAGE}/package.json`, import.meta.url))).version;
} catch (error) {
  tell({ suite: name, version: "", check: "import", passed: false, seconds: 0, error: String(error) });
  process.exit(0);
}
// A module lists its exports by name; the checks stand in the file in the order in which they run.
const text = readFileSync(new URL(`./${name}.mjs`, import.meta.url), "utf8");
const checks = Object.entries(suite).filter(([key]) => key.startsWith("check_"));
checks.sort(([a], [b]) => text.indexOf(`function ${a}(`) - text.indexOf(`function ${b}(`));
for (const [key, check] of checks) {
  const began = performance.now();
  let error = "";
  try {
    await check(url);
  } catch (thrown) {
    error = String(thrown).slice(0, ERROR_CHARS_MAX);
  }
  const seconds = Math.round((performance.now() - began) / 10) / 100;
  const words = key.replace("check_", "").replaceAll("_", " ");
  tell({ suite: suite.PACKAGE, version, check: words, passed: !error, seconds, error });
}
process.exit(0);
