"""One reading of `/metrics`, by whoever tests look at it for."""

from prometheus_client.parser import text_string_to_metric_families as parse


class Page:
    """One reading of the page."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._samples = [sample for family in parse(text) for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        """The sum of what fits."""
        return sum(
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def labels(self, name: str, label: str) -> set[str]:
        return {sample.labels[label] for sample in self._samples if sample.name == name}
