"""The pixel DiT: its study of forms of attention, and the speed of its steps."""

from .results import result


def pixel_dit_study_table() -> str:
    """The variants of pixel DiT's attention that were trained on an H200, as a Markdown table; "-" is not measured.

    A second distance is that of another seed.
    """
    report = result("h200/pixel_dit_study.json")
    heads = ("distance", "to full", "loss", "keys", "training: pictures/s", "pixels/s, millions", "peak memory, GiB")
    lines = [f"| side | attention | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for side, names in report["variants"].items():
        rows = report["sides"][side]
        of_full = rows["full"]["distance"]["value"]
        for name in names:
            row = rows.get(name)
            if row is None:
                lines.append(f"| {side} | {name} |{' - |' * len(heads)}")
                continue
            value = row["distance"]["value"] if "distance" in row else None
            repeated = [x["distance"]["value"] for x in row.get("other_seeds", {}).values() if "distance" in x]
            cells = [
                "-" if value is None else ", ".join(f"{x:.1f}" for x in (value, *repeated)),
                "-" if value is None else f"{value / of_full - 1:+.1%}",
                f"{row['loss_last_tenth']:.4f}",
                f"{row['keys_per_query']:,}",
                f"{row['train_images_per_s']:,.0f}",
                f"{row['train_tokens_per_s'] / 1e6:.2f}",
                f"{row['train_memory_gib']:.2f}",
            ]
            lines.append(f"| {side} | {name} | {' | '.join(cells)} |")
    versions = report["versions"]
    text = f"One {report['gpu']}, torch {versions['torch']}, Triton {versions['triton']}, Python {versions['python']}:"
    return "\n".join([text, "", *lines, "", "```", *report["commands"], "```"])


def pixel_dit_speed_table() -> str:
    """Training and sampling steps of a pixel DiT-S on an H200, as a Markdown table."""
    report = result("h200/pixel_dit_speed.json")
    found = {(row["side"], row["method"], row["step"]): row for row in report["rows"]}
    heads = ("training: pictures/s", "LLSA is", "pixels/s, thousands", "peak, GiB")
    heads += ("sampling: pictures/s", "LLSA is", "peak, GiB")
    lines = [f"| side | attention | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for side in sorted({side for side, _, _ in found}):
        for method in ("llsa", "full, cuDNN", "full, FlashAttention-2"):
            train, sample = (found[side, method, step] for step in ("train", "sample"))
            times = [found[side, "llsa", row["step"]]["images_per_s"] / row["images_per_s"] for row in (train, sample)]
            name = f"LLSA, {train['levels']} levels" if method == "llsa" else method
            faster = ["" if method == "llsa" else f"{x:.3g}x" for x in times]
            cells = [
                f"{train['images_per_s']:.3g}",
                faster[0],
                f"{train['tokens_per_s'] / 1e3:,.0f}",
                f"{train['memory_gib']:.1f}",
                f"{sample['images_per_s']:.3g}",
                faster[1],
                f"{sample['memory_gib']:.2f}",
            ]
            lines.append(f"| {side} | {name} | {' | '.join(cells)} |")
    versions = report["versions"]
    text = f"One {report['gpu']}, bf16, blocks compiled, torch {versions['torch']}, Triton {versions['triton']}:"
    return "\n".join([text, "", *lines])
