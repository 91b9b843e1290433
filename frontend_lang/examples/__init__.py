"""Programs to read, to run and to start from. Each is a file of its own with a `main`:

python -m sapwood.frontend_lang.examples.few_shot_qa [--backend http://127.0.0.1:8000]
"""
