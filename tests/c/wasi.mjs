// node wasi.mjs PROGRAM.wasm ARGUMENT...: run a WASI program; an argument that is a folder can be read by it
import { readFileSync, statSync } from "node:fs";
import { WASI } from "node:wasi";

const [program, ...given] = process.argv.slice(2);
const folders = given.filter((name) => statSync(name, { throwIfNoEntry: false })?.isDirectory());
const wasi = new WASI({
  version: "preview1",
  args: [program, ...given],
  preopens: Object.fromEntries(folders.map((name) => [name, name])),
  returnOnExit: true,
});
const { instance } = await WebAssembly.instantiate(readFileSync(program), wasi.getImportObject());
process.exitCode = wasi.start(instance);
