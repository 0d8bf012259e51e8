"""`hotbed serve`: a small HTTP scorer over a Scorer (docs/serve.md). Needs the extra `serve`."""
