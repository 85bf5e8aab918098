"""SentencePiece `.model` files."""

from pathlib import Path

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

_META_SPACE = "\u2581"


class SentencePieceTokenizer:
    """A SentencePiece model. Its own normalisation applies; the probe shows what that loses."""

    kind = "sentencepiece"
    # All merges of a text wait in one queue: short pieces take a fifth less time than long ones.
    piece_characters = 256
    library = f"sentencepiece {sentencepiece.__version__}"

    def __init__(self, path: Path):
        """Raises ValueError where `path` is no SentencePiece model."""
        content = path.read_bytes()
        proto = sentencepiece_model_pb2.ModelProto()
        try:
            proto.ParseFromString(content)
            self._model = sentencepiece.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # protobuf's DecodeError and sentencepiece's RuntimeError
            raise ValueError(f"not a SentencePiece model ({error})") from error
        self.vocab_size = self._model.vocab_size()
        self.default_bos = self._or_none(self._model.bos_id())
        self.default_eod = self._or_none(self._model.eos_id())
        control = sentencepiece_model_pb2.ModelProto.SentencePiece.CONTROL
        self.control_pieces = tuple(p.piece for p in proto.pieces if p.type == control)
        self.space_at_cut = "drop" if _cuts_exactly(proto) else None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return self._model.encode_as_numpy(texts, num_threads=1)

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids)

    def piece(self, token: int) -> str:
        return self._model.id_to_piece(token)

    def id_of(self, piece: str) -> int | None:
        token = self._model.piece_to_id(piece)
        return token if self._model.id_to_piece(token) == piece else None

    @staticmethod
    def _or_none(token: int) -> int | None:
        return None if token < 0 else token


def _cuts_exactly(proto: sentencepiece_model_pb2.ModelProto) -> bool:
    """Whether the rule of long_text holds: found by trial on hostile texts with six models."""
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
    return (
        trainer.model_type == sentencepiece_model_pb2.TrainerSpec.BPE
        and normalizer.add_dummy_prefix
        and normalizer.escape_whitespaces
        and not trainer.treat_whitespace_as_suffix
        and not any(
            _META_SPACE in piece.piece.lstrip(_META_SPACE)
            or (piece.type == user_defined and (_META_SPACE in piece.piece or " " in piece.piece))
            for piece in proto.pieces
        )
    )
