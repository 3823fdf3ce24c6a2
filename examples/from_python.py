"""Reinforcement learning from Python, in the cells of a notebook: rows, rewards, a run.

    python examples/from_python.py        about a minute on two CPU cores, with a tiny random model

The functions below are called in this process. Functions of another file (`from mine import right`)
score in worker processes, which end a score that hangs or takes too much memory.
"""

# %% Rows: a prompt each, and whatever the rewards need.
import jetrl

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]


# %% Rewards: a function of TRL's kind gets all completions of a step, and the rows' columns.
def digits(completions, answer, **columns):
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


def right(prompt, completion):
    return float(completion.strip() == prompt.answer)


# %% Train. A dict is a section of the settings (docs/settings.md); "demo" is the recipe it changes.
result = jetrl.train(
    "demo",
    data=rows,
    rewards=[digits, right],
    reward_weights=[1.0, 0.5],
    run={"name": "from-python"},
    task={"options": {"format": "text"}},
    sft={"steps": 0},
    rollout={"prompts_per_step": 8, "samples_per_prompt": 8, "max_tokens": 6},
    train={"lr": 1e-3, "updates_per_step": 1},
    eval={"every": 0},
    loop={"steps": 30},
)
print(result.model_path, result.report_path)
