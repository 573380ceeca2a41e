from paceline.config.registry import WorkloadEntry
from paceline.workloads.topics.estimator import TopicModel as TopicModel
from paceline.workloads.topics.files.datasets import NumpyDiskDataset as NumpyDiskDataset
from paceline.workloads.topics.files.datasets import TorchDiskDataset as TorchDiskDataset
from paceline.workloads.topics.files.reading import convert as convert
from paceline.workloads.topics.files.reading import read_counts as read_counts
from paceline.workloads.topics.files.texts import TextOptions as TextOptions
from paceline.workloads.topics.files.texts import read_text as read_text
from paceline.workloads.topics.in_process import fit as fit
from paceline.workloads.topics.result.explorer import write_explorer as write_explorer
from paceline.workloads.topics.result.model import TopicFit as TopicFit
from paceline.workloads.topics.result.model import align_topics as align_topics
from paceline.workloads.topics.result.model import sort_documents as sort_documents
from paceline.workloads.topics.result.plots import plot_loss as plot_loss
from paceline.workloads.topics.result.plots import plot_structure as plot_structure
from paceline.workloads.topics.result.plots import plot_top_terms as plot_top_terms

ENTRY: WorkloadEntry
