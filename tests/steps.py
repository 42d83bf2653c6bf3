"""Five steps in one file, and the server that answers them."""

STEPS = {
    "answers": {"input": "docs.jsonl", "prompt": "Answer: {text}"},
    "judged": {"input": "answers", "prompt": "Judge: {answer}", "answer": "rating"},
    "best": {"sql": "select id, topic, answer from judged where rating = 'good'"},
    "topics": {
        "input": {
            "sql": "select topic as id, string_agg(answer, ' ' order by id) as text "
            "from judged where rating = 'good' group by topic"
        },
        "prompt": "Sum up: {text}",
    },
    "rejected": {"sql": "select id from answers anti join best using (id)"},
}


def reply(payload, times):
    question = payload["messages"][-1]["content"]
    if question.startswith("Judge"):
        return "good" if int(question.split()[-1]) % 4 else "bad"
    return f"answer to {question}"
