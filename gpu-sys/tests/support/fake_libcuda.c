/* A driver library that does nothing but write down what it is asked.
 *
 * Built by the tests as libcuda.so.1 and found through LD_LIBRARY_PATH. Environment:
 *   FAKE_CUDA_LOG      file to which each call is appended, one a line: NAME ARGUMENT
 *   FAKE_CUDA_FAIL     NAME=STATUS[,NAME=STATUS...]: those functions return STATUS
 *   FAKE_CUDA_DEVICES  how many devices there are (1)
 *   FAKE_CUDA_BUSY     a file: while it exists, events and streams are not ready
 * With -DWITHOUT_EVENTS the library lacks cuEventCreate, as a very old driver might.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
#define SUCCESS 0
#define NOT_READY 600
/* A device address that no host address has. */
#define DEVICE_OFFSET 0x100000000000ULL

static CUresult call(const char *name, unsigned long long argument) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (log) {
        fprintf(log, "%s %llx\n", name, argument);
        fclose(log);
    }
    const char *failing = getenv("FAKE_CUDA_FAIL");
    size_t length = strlen(name);
    while (failing && *failing) {
        if (strncmp(failing, name, length) == 0 && failing[length] == '=')
            return atoi(failing + length + 1);
        failing = strchr(failing, ',');
        failing = failing ? failing + 1 : NULL;
    }
    return SUCCESS;
}

static CUresult ready(const char *name, const void *handle) {
    CUresult result = call(name, (unsigned long long)handle);
    const char *busy = getenv("FAKE_CUDA_BUSY");
    return result == SUCCESS && busy && access(busy, F_OK) == 0 ? NOT_READY : result;
}

CUresult cuInit(unsigned flags) { return call("cuInit", flags); }

CUresult cuDeviceGetCount(int *count) {
    const char *devices = getenv("FAKE_CUDA_DEVICES");
    *count = devices ? atoi(devices) : 1;
    return call("cuDeviceGetCount", *count);
}

CUresult cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return call("cuDeviceGet", ordinal);
}

CUresult cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "Fake GPU");
    return call("cuDeviceGetName", device);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = 1;
    return call("cuDeviceGetAttribute", attribute);
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = (void *)0xc0;
    return call("cuDevicePrimaryCtxRetain", device);
}

CUresult cuDevicePrimaryCtxRelease_v2(int device) {
    return call("cuDevicePrimaryCtxRelease", device);
}

static _Thread_local int depth;

CUresult cuCtxPushCurrent_v2(void *context) {
    depth++;
    return context == (void *)0xc0 ? SUCCESS : 201;
}

CUresult cuCtxPopCurrent_v2(void **context) {
    *context = (void *)0xc0;
    return depth-- > 0 ? SUCCESS : 201;
}

/* The functions below need a current context, as the real ones do. */
#define NEEDS_CONTEXT \
    if (depth < 1) return 201

CUresult cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 3 || bytes == 0) return 1;
    return call("cuMemHostRegister", (unsigned long long)at);
}

CUresult cuMemHostUnregister(void *at) {
    NEEDS_CONTEXT;
    /* Faults, and fails the test, if the memory has gone before its registration. */
    *(volatile char *)at = 1;
    return call("cuMemHostUnregister", (unsigned long long)at);
}

CUresult cuMemHostGetDevicePointer_v2(unsigned long long *device, void *at, unsigned flags) {
    NEEDS_CONTEXT;
    *device = (unsigned long long)at + DEVICE_OFFSET;
    return call("cuMemHostGetDevicePointer", flags);
}

#ifndef WITHOUT_EVENTS
CUresult cuEventCreate(void **event, unsigned flags) {
    NEEDS_CONTEXT;
    static unsigned long long next = 0xe0;
    *event = (void *)__sync_fetch_and_add(&next, 1);
    return call("cuEventCreate", flags);
}
#endif

CUresult cuEventRecord(void *event, void *stream) {
    NEEDS_CONTEXT;
    (void)stream;
    return call("cuEventRecord", (unsigned long long)event);
}

CUresult cuEventQuery(void *event) {
    NEEDS_CONTEXT;
    return ready("cuEventQuery", event);
}

CUresult cuEventDestroy_v2(void *event) {
    NEEDS_CONTEXT;
    return call("cuEventDestroy", (unsigned long long)event);
}

CUresult cuStreamQuery(void *stream) {
    NEEDS_CONTEXT;
    return ready("cuStreamQuery", stream);
}

CUresult cuGetErrorName(unsigned status, const char **name) {
    *name = "CUDA_ERROR_FAKE";
    return status < 1000 ? SUCCESS : 1;
}
