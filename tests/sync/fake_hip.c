/* The calls of the HIP runtime that weight sync uses, over POSIX shared memory: for tests without a device.
 *
 * A device is a name (16 bytes of UUID); which ones a process sees, and in which order, FAKE_HIP_DEVICES says
 * ("aa,bb": two devices whose UUIDs repeat these bytes). Device memory is a shared-memory segment whose first page says
 * whose it is; FAKE_HIP_MEMORY bounds how much a process may allocate. Stricter than a real runtime where that finds
 * mistakes: memory opens on its own device only, never in the process that exported it, and not after it was freed. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       MAP_FAILED_ = 205, PAGE = 4096, MOST = 1024 };
typedef struct { char reserved[64]; } Handle;
typedef struct { char bytes[16]; } Uuid;
typedef struct { uint64_t size; unsigned char uuid[16]; int32_t owner; } Header;
typedef struct { char *base; size_t length; char name[48]; int opened; } Block;

static Block blocks[MOST];
static size_t allocated;
static int made;
static __thread int current;

static int devices(unsigned char found[16]) {
    const char *text = getenv("FAKE_HIP_DEVICES");
    int count = 0;
    for (; text && *text && count < 16; text += text[2] ? 3 : 2) found[count++] = (unsigned char)strtol((char[]){text[0], text[1], 0}, NULL, 16);
    return count;
}
static int uuid_of(int ordinal, unsigned char uuid[16]) {
    unsigned char found[16];
    if (ordinal < 0 || ordinal >= devices(found)) return INVALID_DEVICE;
    memset(uuid, found[ordinal], 16);
    return SUCCESS;
}
static Block *block_at(const void *address) {
    for (int i = 0; i < MOST; i++)
        if (blocks[i].base && blocks[i].base + PAGE == (const char *)address) return &blocks[i];
    return NULL;
}
static Block *unused(void) {
    for (int i = 0; i < MOST; i++)
        if (!blocks[i].base) return &blocks[i];
    return NULL;
}
int hipGetDeviceCount(int *count) {
    unsigned char found[16];
    *count = devices(found);
    return *count ? SUCCESS : NO_DEVICE;
}
int hipSetDevice(int ordinal) {
    unsigned char uuid[16];
    int code = uuid_of(ordinal, uuid);
    if (!code) current = ordinal;
    return code;
}
int hipDeviceGetUuid(Uuid *uuid, int ordinal) { return uuid_of(ordinal, (unsigned char *)uuid->bytes); }
int hipMalloc(void **address, size_t size) {
    const char *most = getenv("FAKE_HIP_MEMORY");
    Block *block = unused();
    Header header = {size, {0}, getpid()};
    int code = uuid_of(current, header.uuid);
    if (code) return code;
    if (!block || (most && allocated + size > strtoull(most, NULL, 10))) return OUT_OF_MEMORY;
    snprintf(block->name, sizeof block->name, "/fakehip-%d-%d", getpid(), made++);
    int file = shm_open(block->name, O_CREAT | O_EXCL | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, (off_t)(size + PAGE))) return OUT_OF_MEMORY;
    char *base = mmap(NULL, size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED) return OUT_OF_MEMORY;
    memset(base + PAGE, 0xEE, size);
    memcpy(base, &header, sizeof header);
    block->base = base, block->length = size + PAGE, block->opened = 0;
    allocated += size;
    *address = base + PAGE;
    return SUCCESS;
}
int hipFree(void *address) {
    Block *block = block_at(address);
    if (!block || block->opened) return INVALID_VALUE;
    allocated -= block->length - PAGE;
    munmap(block->base, block->length);
    shm_unlink(block->name);
    block->base = NULL;
    return SUCCESS;
}
int hipIpcGetMemHandle(Handle *handle, void *address) {
    Block *block = block_at(address);
    if (!block || block->opened) return INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, block->name, sizeof block->name);
    return SUCCESS;
}
int hipIpcOpenMemHandle(void **address, Handle handle, unsigned int flags) {
    (void)flags;
    Block *block = unused();
    Header header;
    unsigned char uuid[16];
    int code = uuid_of(current, uuid);
    if (code) return code;
    handle.reserved[47] = 0;
    int file = block ? shm_open(handle.reserved, O_RDWR, 0600) : -1;
    if (file < 0) return INVALID_VALUE;
    if (read(file, &header, sizeof header) != (ssize_t)sizeof header) { close(file); return INVALID_VALUE; }
    code = header.owner == getpid() ? INVALID_CONTEXT : memcmp(header.uuid, uuid, 16) ? INVALID_DEVICE : SUCCESS;
    char *base = code ? MAP_FAILED : mmap(NULL, header.size + PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (base == MAP_FAILED) return code ? code : MAP_FAILED_;
    block->base = base, block->length = header.size + PAGE, block->opened = 1;
    *address = base + PAGE;
    return SUCCESS;
}
int hipIpcCloseMemHandle(void *address) {
    Block *block = block_at(address);
    if (!block || !block->opened) return INVALID_VALUE;
    munmap(block->base, block->length);
    block->base = NULL;
    return SUCCESS;
}
int hipMemcpy(void *target, const void *source, size_t size, int kind) {
    (void)kind;
    memcpy(target, source, size);
    return SUCCESS;
}
int hipDeviceSynchronize(void) { return SUCCESS; }
__attribute__((destructor)) static void end(void) {
    for (int i = 0; i < MOST; i++)
        if (blocks[i].base && !blocks[i].opened) shm_unlink(blocks[i].name);
}
