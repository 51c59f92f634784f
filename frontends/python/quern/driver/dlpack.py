"""DLPack (https://dmlc.github.io/dlpack): a run's tensors as other libraries read them, without a copy."""

import ctypes
from collections.abc import Callable
from typing import Any

from quern.driver.library import library

CPU, CUDA = 1, 2
DEVICES = {"cpu": CPU, "cuda": CUDA}
DTYPES = {"f32": (2, 32), "bf16": (4, 16)}  # code of the kind, and bits
NAME = b"dltensor"


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(DLManagedTensor))
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

exported: dict[int, tuple[Any, ...]] = {}  # by address: what other libraries hold, and what has to live as long


def delete(managed: Any) -> None:
    """Called by the library that has the tensor, when it is done, or with a capsule that no library took."""
    exported.pop(ctypes.addressof(managed.contents), None)


deleter = DELETER(delete)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(deleter))  # tensors may outlive this module, when the interpreter ends


class TensorView:
    """A tensor of a run where it is, for torch.from_dlpack, cupy.from_dlpack or numpy.from_dlpack: read it before the run's
    next call, which may change it. Change it with Run.write."""

    def __init__(self, shape: tuple[int, ...], dtype: str, device: str, unit: int, data: Callable[[], int], owner: object) -> None:
        """`data` finishes what the device does and returns the address; `owner` keeps the memory."""
        self.shape, self.dtype, self.device, self.unit = shape, dtype, device, unit
        self._data, self._owner = data, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        if self.device not in DEVICES:
            raise BufferError(f"DLPack has no devices of the kind {self.device}; copy the tensor with Run.read")
        return DEVICES[self.device], self.unit if self.device == "cuda" else 0

    def __dlpack__(self, *, stream: object = None, max_version: object = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> object:
        """`stream` need not wait: the run waits for its device first. `max_version`: it is of version 0, as any library
        takes."""
        kind, unit = self.__dlpack_device__()
        if copy or dl_device not in (None, (kind, unit)):
            raise BufferError(f"a view is not copied, nor moved from the device {(kind, unit)}; copy the tensor with Run.read")
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed = DLManagedTensor()
        managed.tensor = DLTensor(self._data(), kind, unit, len(self.shape), *DTYPES[self.dtype], 1, shape, None, 0)
        managed.deleter = ctypes.cast(deleter, ctypes.c_void_p)
        address = ctypes.addressof(managed)
        exported[address] = managed, shape, self._owner
        capsule: object = new_capsule(address, NAME, ctypes.cast(library().quern_destroy_capsule, ctypes.c_void_p))
        return capsule
