"""What the dense model is asked to write when it makes its own calibration text.

Only words: 48 topics in 8 kinds of request as chat messages, and openings of documents to continue.
Nothing here appears in the held-out text.
"""

from __future__ import annotations

TOPICS = (
    "photosynthesis",
    "the water cycle",
    "how a bicycle stays upright",
    "sorting a list of numbers",
    "the French Revolution",
    "baking bread at home",
    "black holes",
    "learning to play the guitar",
    "saving money as a student",
    "the human heart",
    "writing a cover letter",
    "recursion in programming",
    "volcanoes",
    "healthy sleep",
    "the game of chess",
    "electric cars",
    "the Roman Empire",
    "growing tomatoes",
    "fractions and percentages",
    "teamwork at the office",
    "how vaccines work",
    "the ocean at night",
    "computer networks",
    "a trip to Japan",
    "poetry",
    "renewable energy",
    "training a dog",
    "supply and demand",
    "the planet Mars",
    "version control with git",
    "public speaking",
    "Renaissance painting",
    "bees and pollination",
    "a small-town library",
    "linear equations",
    "first aid for burns",
    "databases and SQL",
    "the history of the printing press",
    "running a marathon",
    "coffee",
    "friendship",
    "earthquakes",
    "the English language",
    "time management",
    "a lighthouse keeper",
    "machine learning",
    "composting kitchen waste",
    "music theory",
)

REQUESTS = (
    "Explain {} to a ten-year-old.",
    "Write a short story about {}.",
    "List five facts about {} and say why each matters.",
    "What are common mistakes people make about {}?",
    "Write an email to a colleague in which {} comes up.",
    "Give me step-by-step advice on {}.",
    "Compare two different views of {} in a few paragraphs.",
    "Ask me three quiz questions about {} and then answer them.",
)

OPENINGS = (
    "Chapter 1\n\nThe rain had not stopped for three days when",
    "Abstract\n\nWe study the problem of",
    "# Getting started\n\nTo install the package, run",
    'def parse_header(line):\n    """Return',
    "The town council met on Tuesday evening to discuss",
    "Q: What is the difference between a virus and a bacterium?\nA:",
    "Dear editor,\n\nI am writing about",
    "In mathematics, a group is",
    "Ingredients:\n- 2 cups of flour\n",
    "## Error handling\n\nWhen a request fails, the server",
    'She closed the door quietly and said, "',
    "The economy of the region depends on",
    "import json\nimport sys\n\n",
    "Once upon a time, in a village between two rivers,",
    "The results of the experiment show that",
    "Terms of use. By using this service you agree",
    "A brief history of timekeeping begins with",
    "Dialogue\n\nAnna: Have you finished the report?\nBen:",
    "The following table lists the options that the command accepts:",
    "Exercise 4. A train leaves the station at",
    "The old man looked at the sea and",
    "Climate models predict that",
    "SELECT name, COUNT(*) FROM",
    "Travel guide: the best time to visit",
    "According to the committee's report,",
    "The bird is about 20 centimetres long and",
    "To be a good listener, you must first",
    "The file format consists of a header followed by",
    "My grandmother used to tell us that",
    "In 1905, a young clerk in the patent office",
    "Installation requires Python 3.10 or later and",
    "The patient was admitted to the hospital with",
)


def chat_prompts() -> list[str]:
    """All user messages, topic after topic."""
    return [request.format(topic) for topic in TOPICS for request in REQUESTS]
