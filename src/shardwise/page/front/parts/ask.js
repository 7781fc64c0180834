// Questions to the server that the page came from. A page in a file has none, and answers nothing.

export async function ask(question) {
  const response = await fetch("ask", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
  });
  if (!response.ok) throw new Error(`the server says: ${response.status} ${response.statusText}`);
  const answer = await response.json();
  if (answer.error) throw new Error(answer.error);
  return answer;
}
