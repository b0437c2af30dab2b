// What the scripts of both packages share: the questions, and how results get back to pytest.

export const QUESTION = "What is the capital of France?";
export const SUM = "What is 2+3?";

// More text than the embedded model's context of 2048 tokens holds, in these tests.
export const TOO_LONG = "word ".repeat(3000);

/** Run every case; the last line on stdout is one JSON object of what each returned, or how it failed. */
export async function report(cases) {
  const found = {};
  for (const [name, run] of Object.entries(cases)) {
    try {
      found[name] = await run();
    } catch (error) {
      found[name] = { failure: `${error.name}: ${error.message}` };
    }
  }
  console.log(JSON.stringify(found));
}
