"""The REST server: editors, agents and scripts talk to it over HTTP in five dialects."""
