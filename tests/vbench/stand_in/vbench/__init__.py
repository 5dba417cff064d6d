"""The interface of VBench 0.1.5 without its networks: the score of a video is its length in bytes, scaled.

The variable STAND_IN makes it fail in the ways that the real one can: "exit", "raise", "silent", "nan", "skip", "form".
"""

import json
import os
import sys


class VBench:
    def __init__(self, device, full_info_dir, output_path):
        self.device, self.full_info_dir, self.output_path = device, full_info_dir, output_path
        os.makedirs(self.output_path, exist_ok=True)

    def evaluate(
        self, videos_path, name, prompt_list=[], dimension_list=None, local=False, read_frame=False,  # noqa: B006
        mode="vbench_standard", **kwargs,
    ):  # fmt: skip
        fault = os.environ.get("STAND_IN", "")
        if fault == "exit":
            sys.exit(7)
        if fault == "raise" or fault == dimension_list[0]:
            raise NotImplementedError("UnImplemented dimension!")
        if fault == "silent":
            return
        with open(self.full_info_dir) as file:
            prompts = json.load(file)
        names = os.listdir(videos_path)
        postfix = os.path.splitext(names[0])[1]
        results = {}
        for dimension in dimension_list:
            details = []
            for entry in prompts:
                assert dimension in entry["dimension"]
                for i in range(5):
                    video = f"{entry['prompt_en']}-{i}{postfix}"
                    if video in names:
                        path = os.path.join(videos_path, video)
                        details.append({"video_path": path, "video_results": os.path.getsize(path) / 1e6})
                    else:
                        sys.stdout.write(f"WARNING!!! This required video is not found! {video}\n")
            if fault == "skip":
                details.pop()
            value = sum(detail["video_results"] for detail in details) / len(details)
            results[dimension] = [float("nan") if fault == "nan" else value, details]
        if fault == "form":
            results = {"something": 1}
        with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
            json.dump(results, file)
