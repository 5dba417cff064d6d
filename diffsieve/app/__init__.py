"""The web page: dense and sparse attention side by side. `diffsieve app` starts it; needs the extra `app` (Gradio).

Only `page`, `components`, `look`, `events`, `api` and `server` import Gradio; everything else is plain Python over
`diffsieve.compare`.
"""
