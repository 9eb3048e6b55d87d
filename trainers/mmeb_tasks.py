"""The tasks of MMEB-V2: which there are, how each is read, ranked and scored.

The 78 of the leaderboard, and six that older papers report in place of some of them: the page tasks before they were
repaired, MomentSeeker with 1,800 rows, and the English halves of ViDoRe v2.
Source: TIGER-AI-Lab/VLM2Vec, experiments/public/eval and docs/mmebv2_reproduction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .errors import MoEMBError, nearest
from .evaluation_conventions import EvaluationConventions


IMAGE_ANNOTATIONS = "ziyjiang/MMEB_Test_Instruct"
MEDIA_REPOSITORY = "TIGER-Lab/MMEB-V2"
HIT, NDCG = "hit@1", "ndcg_linear@5"

_QUESTION = (
    "Given a video and a question, select the most accurate answer from the provided candidates. "
    "Return only the exact text of your chosen answer. Question:"
)
_VIDEO = "Understand the content of the provided video."
_PAGE_QUERY = "Find a document image that matches the given query:"
_PAGE = "Understand the content of the provided document image."


class UnknownTaskError(MoEMBError, ValueError):
    """A task or group that the benchmark does not have. The message names it and the nearest one it has."""


@dataclass(frozen=True)
class MMEBTask:
    """
    Args:
        name (`str`): as the leaderboard calls it.
        group (`str`): such as `"image-cls"`; the part before the dash is the modality.
        reader (`str`): which reader of this room understands it.
        repository (`str`): Hub dataset of its annotations.
        subset (`str`, *optional*): configuration of it.
        split (`str`, *optional*, defaults to `"test"`): split of it.
        media (`str`, *optional*): folder of its frames or pages below the benchmark's, as the official configuration
            has it.
        query_instruction (`str`, *optional*): what is asked; image tasks carry it in their rows.
        candidate_instruction (`str`, *optional*): what is asked of candidates.
        metric (`str`, *optional*): main metric.
        is_global (`bool`, *optional*): whether the whole pool is ranked.
        expected_rows (`int`, *optional*): rows of the leaderboard's version, where known.
        max_rows (`int`, *optional*): rows that are scored, the first ones, where the data set has more.
        variant_of (`str`, *optional*): the leaderboard's task this one stands in for.
    """

    name: str
    group: str
    reader: str
    repository: str
    subset: str | None = None
    split: str = "test"
    media: str = ""
    query_instruction: str = ""
    candidate_instruction: str = ""
    metric: str = HIT
    is_global: bool = False
    expected_rows: int | None = None
    max_rows: int | None = None
    variant_of: str | None = None

    @property
    def modality(self) -> str:
        """`"image"`, `"video"` or `"visdoc"`."""
        return self.group.partition("-")[0]


def _image_tasks() -> Iterator[MMEBTask]:
    groups = {
        ("image-cls", "image-text"): (
            "ImageNet-1K N24News HatefulMemes VOC2007 SUN397 Place365 ImageNet-A ImageNet-R ObjectNet Country211"
        ),
        ("image-qa", "image-text"): (
            "OK-VQA A-OKVQA DocVQA InfographicsVQA ChartQA Visual7W ScienceQA VizWiz GQA TextVQA"
        ),
        ("image-ret", "image-text"): "MSCOCO_i2t VisualNews_i2t",
        ("image-ret", "text-image"): "VisDial MSCOCO_t2i VisualNews_t2i WebQA EDIS Wiki-SS-NQ",
        ("image-ret", "image-image"): "CIRR NIGHTS OVEN FashionIQ",
        ("image-vg", "image-image"): "MSCOCO RefCOCO RefCOCO-Matching Visual7W-Pointing",
    }
    for (group, reader), names in groups.items():
        for name in names.split():
            yield MMEBTask(
                name, group, reader, IMAGE_ANNOTATIONS, subset=name, media="image-tasks", expected_rows=1000
            )


def _video(name: str, group: str, reader: str, media: str, query: str, **fields) -> MMEBTask:
    folder = f"video-tasks/frames/{media}"
    fields = {"repository": f"VLM2Vec/{name}", "candidate_instruction": _VIDEO} | fields
    return MMEBTask(name, group, reader, media=folder, query_instruction=query, **fields)


def _video_tasks() -> Iterator[MMEBTask]:
    labels = {"reader": "video-label", "candidate_instruction": ""}
    classes = (
        ("K700", "video_cls/K700", "Recognize the category of the video content.", "VLM2Vec/Kinetics-700"),
        ("HMDB51", "video_cls/HMDB51", "What actions or objects interactions are the person in the video doing?",
         None),
        ("UCF101", "video_cls/UCF101", "What activities or sports are being performed by the person in the video?",
         None),
        ("Breakfast", "video_cls/Breakfast", "Recognize the breakfast type that the person is cooking in the video.",
         None),
    )  # fmt: skip
    for name, media, query, repository in classes:
        more = {"repository": repository} if repository else {}
        yield _video(name, "video-cls", media=media, query=query, is_global=True, **labels, **more)
    asked = "What actions or object interactions are being performed by the person in the video?"
    yield _video(
        "SmthSmthV2", "video-cls", "video-choice", "video_cls/SSv2", asked, candidate_instruction="", max_rows=1000
    )
    questions = {
        "MVBench": {"split": "train"}, "Video-MME": {}, "NExTQA": {"subset": "MC"}, "EgoSchema": {"subset": "Subset"},
        "ActivityNetQA": {},
    }  # fmt: skip
    for name, fields in questions.items():
        yield _video(
            name, "video-qa", "video-question", f"video_qa/{name}", _QUESTION, candidate_instruction="", **fields
        )
    retrieval = {
        "DiDeMo": ("Find a video that includes the following described scenes:", {}),
        "MSR-VTT": ("Find a video that contains the following visual content:", {"subset": "test_1k"}),
        "MSVD": ("Find the video snippet that corresponds to the given summary:", {}),
        "VATEX": ("Select a video that fits the description provided:", {"expected_rows": 4478}),
        "YouCook2": (
            "Find a video that demonstrates the following action while making a recipe:",
            {"repository": "lmms-lab/YouCook2", "split": "val"},
        ),
    }
    for name, (query, fields) in retrieval.items():
        yield _video(name, "video-ret", "text-video", f"video_ret/{name}", query, is_global=True, **fields)
    moment = "Find the clip that corresponds to the described scene in the given video:"
    yield _video("QVHighlight", "video-mret", "moment", "video_mret/QVHighlight", moment)
    yield _video("Charades-STA", "video-mret", "moment", "video_mret/Charades_STA", moment)
    seeker = _video(
        "MomentSeeker", "video-mret", "moment-seeker", "video_mret/MomentSeeker", "",
        candidate_instruction="Understand the content of the provided video clip.", expected_rows=1602,
    )  # fmt: skip
    yield seeker
    yield replace(
        seeker, name="MomentSeeker_1k8", repository="VLM2Vec/MomentSeeker_1k8", expected_rows=1800,
        variant_of="MomentSeeker",
    )  # fmt: skip


def _page(name: str, repository: str, media: str = "", **fields) -> MMEBTask:
    return MMEBTask(
        name, fields.pop("group"), "pages", repository, media=f"visdoc-tasks/{media or name}",
        query_instruction=_PAGE_QUERY, candidate_instruction=_PAGE, metric=NDCG, is_global=True, **fields,
    )  # fmt: skip


def _page_tasks() -> Iterator[MMEBTask]:
    first = {
        "arxivqa": "arxivqa_test_subsampled", "docvqa": "docvqa_test_subsampled", "infovqa": "infovqa_test_subsampled",
        "tabfquad": "tabfquad_test_subsampled", "tatdqa": "tatdqa_test", "shiftproject": "shiftproject_test",
        "syntheticDocQA_artificial_intelligence": "syntheticDocQA_artificial_intelligence_test",
        "syntheticDocQA_energy": "syntheticDocQA_energy_test",
        "syntheticDocQA_government_reports": "syntheticDocQA_government_reports_test",
        "syntheticDocQA_healthcare_industry": "syntheticDocQA_healthcare_industry_test",
    }  # fmt: skip
    for name, repository in first.items():
        yield _page(f"ViDoRe_{name}", f"vidore/{repository}_beir", group="visdoc-vidore1")
    second = "visdoc-vidore2"
    human = "esg_reports_human_labeled_v2"
    yield _page(f"ViDoRe_{human}", f"vidore/{human}", human, group=second)
    for name in ("biomedical_lectures_v2", "economics_reports_v2", "esg_reports_v2"):
        whole = _page(f"ViDoRe_{name}_multilingual", f"vidore/{name}", f"{name}_multilingual", group=second)
        yield whole
        yield replace(
            whole, name=f"ViDoRe_{name}", media=f"visdoc-tasks/{name}", subset="english", variant_of=whole.name
        )
    for name in ("ArxivQA", "ChartQA", "MP-DocVQA", "SlideVQA", "InfoVQA", "PlotQA"):
        yield _page(f"VisRAG_{name}", f"openbmb/VisRAG-Ret-Test-{name}", group="visdoc-visrag", split="train")
    other = "visdoc-ood"
    yield _page("ViDoSeek-page-fixed", "VLM2Vec/ViDoSeek-page-fixed", group=other)
    yield _page("ViDoSeek-page", "VLM2Vec/ViDoSeek-page", group=other, variant_of="ViDoSeek-page-fixed")
    yield _page("ViDoSeek-doc", "VLM2Vec/ViDoSeek", group=other)
    yield _page("MMLongBench-page-fixed", "VLM2Vec/MMLongBench-page-fixed", group=other)
    yield _page("MMLongBench-page", "VLM2Vec/MMLongBench", group=other, variant_of="MMLongBench-page-fixed")
    yield _page("MMLongBench-doc", "VLM2Vec/MMLongBench-doc", group=other)


ALL_TASKS = {task.name: task for task in (*_image_tasks(), *_video_tasks(), *_page_tasks())}
LEADERBOARD = tuple(name for name, task in ALL_TASKS.items() if task.variant_of is None)
GROUPS = tuple(dict.fromkeys(task.group for task in ALL_TASKS.values()))
MODALITIES = ("image", "video", "visdoc")
# The repaired or cut-down version, and what stood in its place before; the English halves replaced nothing.
_ORIGINALS = {
    task.variant_of: name for name, task in ALL_TASKS.items() if task.variant_of and task.subset != "english"
}


def select_tasks(wanted: Sequence[str], conventions: EvaluationConventions) -> list[MMEBTask]:
    """
    Chooses tasks.

    Args:
        wanted (`Sequence[str]`): names of tasks, groups (`"image-cls"`) or modalities (`"visdoc"`); empty means the
            leaderboard's 78. A variant is taken only when named, or when the conventions ask for the originals.
        conventions (`EvaluationConventions`): its `dataset_variants` decides between repaired and original versions.

    Returns:
        `list[MMEBTask]`: in the benchmark's order, without repeats.

    Raises:
        UnknownTaskError: a name that is no task, group or modality.
    """
    names = list(LEADERBOARD) if not wanted else []
    for entry in wanted:
        if entry in ALL_TASKS:
            names.append(entry)
            continue
        found = [name for name in LEADERBOARD if entry in (ALL_TASKS[name].group, ALL_TASKS[name].modality)]
        if not found:
            choices = [*ALL_TASKS, *GROUPS, *MODALITIES]
            raise UnknownTaskError(f"MMEB-V2 has no task or group '{entry}'{nearest(entry, choices)}")
        names += found
    if conventions.dataset_variants == "original":
        names = [_ORIGINALS.get(name, name) for name in names]
    return [task for name, task in ALL_TASKS.items() if name in set(names)]
