// What every Node program shares: the gateway's address, what the scripted model says, and how results are reported.

export const url = process.argv[2];
export const model = "scripted";
export const key = "any";
export const greeting = "Hello from the scripted model.";
export const result = "It is sunny in Oslo.";
export const weather = { city: "Oslo", days: 2 };
export const schema = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city", "days"],
  additionalProperties: false,
};

/** Run the tasks one after the other and print what became of each as one JSON object. */
export async function report(tasks) {
  const results = {};
  for (const [name, task] of Object.entries(tasks)) {
    try {
      await task();
      results[name] = "passed";
    } catch (error) {
      results[name] = String(error?.stack ?? error) + (error?.responseBody ? `\n${error.responseBody}` : "");
    }
  }
  console.log(JSON.stringify(results));
  process.exit(0);
}
