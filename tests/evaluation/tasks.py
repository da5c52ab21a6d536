"""Tasks in lm-eval's format, of each kind of output, with documents beside them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chats import CITIES

QUESTION = 'doc_to_text: "The capital of {{country}} is"\n'
TASKS = {
    "choices": QUESTION
    + "output_type: multiple_choice\ndoc_to_choice: cities\ndoc_to_target: place\n"
    + "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true},"
    + " {metric: acc_norm, aggregation: mean, higher_is_better: true}]\n",
    "likely": QUESTION
    + 'output_type: loglikelihood\ndoc_to_target: " {{city}}"\nfewshot_split: test\nnum_fewshot: 2\n'
    + "metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]\n",
    "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    + "metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false},"
    + " {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]\n",
    "written": QUESTION
    + "output_type: generate_until\ndoc_to_target: city\n"
    + 'generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12}\n'
    + 'filter_list: [{name: word, filter: [{function: regex, regex_pattern: "([^ ]+)"}, {function: take_first}]}]\n'
    + 'metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["[.,]"]}]\n',
}
DOCUMENTS = "dataset_path: json\ndataset_kwargs: {data_files: {test: cities.jsonl}}\ntest_split: test\n"


def write_tasks(folder: Path) -> Path:
    """A folder with all tasks."""
    folder.mkdir(parents=True, exist_ok=True)
    cities = [*CITIES.values()]
    rows = [
        {"country": country, "city": city, "cities": cities, "place": i, "text": f"{country}: {city}, naïve. " * 12}
        for i, (country, city) in enumerate(CITIES.items())
    ]
    (folder / "cities.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{DOCUMENTS}{text}")
    return folder
