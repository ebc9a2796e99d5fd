/* The calls of the CUDA driver that weight sync uses, on the devices and the memory of fake_hip.c. */
#include "fake_hip.c"

static int told(int code) { return code == INVALID_CONTEXT ? 201 : code == OUT_OF_MEMORY ? 2 : code == INVALID_DEVICE ? 101 : code; }
int cuInit(unsigned int flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDeviceGetCount(int *count) { hipGetDeviceCount(count); return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) {
    unsigned char uuid[16];
    *device = ordinal;
    return told(uuid_of(ordinal, uuid));
}
int cuDeviceGetUuid_v2(Uuid *uuid, int device) { return told(hipDeviceGetUuid(uuid, device)); }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return SUCCESS; }
int cuCtxSetCurrent(void *context) { return told(hipSetDevice((int)(intptr_t)context - 1)); }
int cuCtxSynchronize(void) { return SUCCESS; }
int cuMemAlloc_v2(uint64_t *address, size_t size) { return told(hipMalloc((void **)address, size)); }
int cuMemFree_v2(uint64_t address) { return told(hipFree((void *)address)); }
int cuMemcpy(uint64_t target, uint64_t source, size_t size) { return hipMemcpy((void *)target, (void *)source, size, 4); }
int cuIpcGetMemHandle(Handle *handle, uint64_t address) { return told(hipIpcGetMemHandle(handle, (void *)address)); }
int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned int flags) { return told(hipIpcOpenMemHandle((void **)address, handle, flags)); }
int cuIpcCloseMemHandle(uint64_t address) { return told(hipIpcCloseMemHandle((void *)address)); }
int cuGetErrorName(int code, const char **name) {
    *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : code == INVALID_DEVICE ? "CUDA_ERROR_INVALID_DEVICE"
          : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT" : code == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
    return SUCCESS;
}
