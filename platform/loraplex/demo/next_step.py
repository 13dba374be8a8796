"""Lines to copy: how anyone calls what the demonstration set up."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.cli.program import name_program, name_python
from loraplex.demo.question import Asker


def build_hints(url: str, admin_key: str, asker: Asker, others: Sequence[str], question: str) -> str:
    """Return a shell line with curl, a few lines for the openai client, and commands of our own, with real keys.

    Args:
        url: The gateway's address.
        admin_key: Calls every model.
        asker: Who is shown as an application; its key calls its own team and the base.
        others: Teams that this key does not reach; one at least.
        question: What is asked.
    """
    program = name_program()
    return f"""\
With curl:

curl {url}/v1/chat/completions -H 'Authorization: Bearer {asker.key}' \\
  -H 'Content-Type: application/json' \\
  -d '{{"model": "{asker.model}", "messages": [{{"role": "user", "content": "{question}"}}], "max_tokens": 64}}'

With the openai client:

{name_python()} - <<'EOF'
from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="{asker.key}")
answer = client.chat.completions.create(
    model="{asker.model}", messages=[{{"role": "user", "content": "{question}"}}], max_tokens=64
)
print(answer.choices[0].message.content)
EOF

With the command line, as administrator:

export LORAPLEX_URL={url} LORAPLEX_API_KEY={admin_key}
{program} adapters list
{program} chat --model {asker.model}
{program} usage
{program} keys create {others[0]} --name app

The key above is {asker.model}'s: for {" and ".join(others)} take the admin key, or make them keys as in the last line.
"""
