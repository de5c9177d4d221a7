/* Delays writes to files below one directory, or fails syncs: LD_PRELOAD this into the process whose disk is to be slow.
 *
 * ATTACK_DISK_DIRECTORY  real path of the directory; everything else is untouched.
 * ATTACK_DISK_CONTROL    a file that says what to do, looked at before each write:
 *                            all MS    delay every write and sync by MS milliseconds
 *                            once MS   delay one call on a file that lies in the directory itself (the event journal, not the
 *                                      decisions below it); who takes it removes the file
 *                            fail MS   delay nothing, and let every sync fail with EIO (MS is at least 1, and ignored)
 *                        No file: nothing.
 * ATTACK_DISK_COUNT      a file that grows by one byte for each call that was delayed or failed.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static ssize_t (*real_write)(int, const void *, size_t);

/* 0: elsewhere, 1: below the directory, 2: in the directory itself. */
static int is_below(int descriptor) {
    const char *directory = getenv("ATTACK_DISK_DIRECTORY");
    char link[64], path[PATH_MAX];
    if (directory == NULL) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    size_t prefix = strlen(directory);
    if (strncmp(path, directory, prefix) != 0 || path[prefix] != '/') return 0;
    return strchr(path + prefix + 1, '/') == NULL ? 2 : 1;
}

/* Returns whether the call has to fail. */
static int wait_if_told(int descriptor, int is_sync) {
    const char *control = getenv("ATTACK_DISK_CONTROL");
    char word[16];
    long ms = 0;
    int place = control == NULL ? 0 : is_below(descriptor);
    if (place == 0) return 0;
    FILE *file = fopen(control, "re");
    if (file == NULL) return 0;
    int found = fscanf(file, "%15s %ld", word, &ms);
    fclose(file);
    if (found != 2 || ms <= 0) return 0;
    int fails = strcmp(word, "fail") == 0;
    if (fails && !is_sync) return 0;
    /* The one that removes the file has the one delay. */
    if (strcmp(word, "once") == 0 && (place != 2 || unlink(control) != 0)) return 0;
    const char *count = getenv("ATTACK_DISK_COUNT");
    if (count != NULL) {
        int out = open(count, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        if (out >= 0) {
            if (real_write == NULL) real_write = dlsym(RTLD_NEXT, "write");
            (void)!real_write(out, "x", 1);
            close(out);
        }
    }
    if (fails) return 1;
    struct timespec left = {ms / 1000, (ms % 1000) * 1000000L};
    while (nanosleep(&left, &left) != 0) {}
    return 0;
}

#define TOLD(type, name, is_sync, parameters, arguments)    \
    type name parameters {                                  \
        static type(*real) parameters;                      \
        if (real == NULL) real = dlsym(RTLD_NEXT, #name);   \
        if (wait_if_told(descriptor, is_sync)) {            \
            errno = EIO;                                    \
            return -1;                                      \
        }                                                   \
        return real arguments;                              \
    }

TOLD(ssize_t, write, 0, (int descriptor, const void *data, size_t size), (descriptor, data, size))
TOLD(ssize_t, pwrite, 0, (int descriptor, const void *data, size_t size, off_t at), (descriptor, data, size, at))
TOLD(ssize_t, pwrite64, 0, (int descriptor, const void *data, size_t size, off64_t at), (descriptor, data, size, at))
TOLD(ssize_t, writev, 0, (int descriptor, const struct iovec *parts, int count), (descriptor, parts, count))
TOLD(int, fdatasync, 1, (int descriptor), (descriptor))
TOLD(int, fsync, 1, (int descriptor), (descriptor))
