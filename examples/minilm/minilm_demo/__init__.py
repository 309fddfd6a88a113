"""The parts of the MiniLM demo: data, model, variants, measures, latency and the page."""
