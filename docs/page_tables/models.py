"""The models that are supported, and how well mini-wan draws."""

from diffsieve.processors import supported_models

from .results import result


def supported_models_table() -> str:
    """The supported models as a Markdown table, from the registry of the adapters."""
    lines = ["| family | pipelines | transformers |", "|---|---|---|"]
    for row in supported_models():
        cells = (row["family"], *(_code(row[name]) for name in ("pipelines", "transformers")))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def mini_wan_table() -> str:
    """How often mini-wan draws what the prompt says, as a Markdown table."""
    report = result("h200/mini_wan_quality.json")
    settings = report["settings"]
    return "\n".join(
        [
            f"On {report['prompts']} prompts whose combination of subject, motion and colour was held out of training "
            f"({settings['steps']} steps,",
            f"guidance {settings['guidance_scale']}, {report['scheduler']}, {report['dtype']}):",
            "",
            "| subject right | motion right | background colour right |",
            "|---|---|---|",
            "| " + " | ".join(f"{report[name]:.1%}" for name in ("subject", "motion", "colour")) + " |",
        ]
    )
