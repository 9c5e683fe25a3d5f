// What all clients of JavaScript are asked, and how a program of this folder reports what came: the
// same as harness.py.

export const URL = process.argv[2];
export const MODEL = "scripted";
export const CHAT = "Say: hello from the model";
export const CALL = 'Call: {"name": "weather", "arguments": {"city": "Paris"}}';
export const TOOL = `${CALL}\nSay: the tool said {result}`;
export const CITY = '{"name": "Paris", "people": 2}';
export const STRUCTURED = `Say: ${CITY}`;
export const LONG = "word ".repeat(80_000);
export const PNG =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";

export const weather = ({ city }) => `sunny in ${city}`;

export async function collected(parts) {
  const found = [];
  for await (const part of parts) found.push(part);
  return found;
}

/** The error of a promise. */
export async function errorOf(promise) {
  try {
    return `no error but ${JSON.stringify(await promise)}`;
  } catch (error) {
    return error;
  }
}

/** Run the functions of each client by feature, and print what they return, a line of JSON each. */
export async function report(clients) {
  for (const [client, features] of Object.entries(clients)) {
    for (const [feature, run] of Object.entries(features)) {
      const found = { client, feature };
      try {
        found.value = await run();
      } catch (error) {
        found.error = `${error.name}: ${error.message}`.slice(0, 500);
      }
      console.log(JSON.stringify(found));
    }
  }
}
