"""How production would be made to run the winner by hand: the facts, from which each form of a patch is written."""

from pydantic import Field

from tunewright.domain.model import Model


class Recipe(Model):
    """Taken from production itself when the winner was found. Credentials are left out of the words."""

    command: tuple[str, ...] = Field(default=(), description="The container's `command`; empty: left as it is.")
    args: tuple[str, ...] = Field(default=(), description="Its `args`, or the whole command of a process.")
    environment: dict[str, str] = Field(default_factory=dict, description="Variables of knobs that must be set.")
    namespace: str = ""
    deployment: str = Field(default="", description="Empty: processes of one machine.")
    container: str = ""
    helm_release: str = Field(default="", description="The Helm release that made the Deployment; empty: none.")
    stack_model: str = Field(
        default="", description="Its entry in `servingEngineSpec.modelSpec` of vLLM's production-stack chart, if it is."
    )
