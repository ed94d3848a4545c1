/* The node as a process of this machine: a board for tests and fuzzing, with the RAM that the command line gives it.

   host --arena BYTES [--blob FILE] [--socket PATH]: serves PATH, one gateway after the other, or else stdin and stdout. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "board.h"
#include "node.h"

static void *region, *blob;
static uint32_t region_bytes, blob_bytes, ticks;
static int listener = -1, in = -1, out = -1;
static uint8_t inbox[4096], outbox[4096];
static size_t in_next, in_end, out_end;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void flush(void) {
    size_t sent = 0;
    while (sent < out_end && out >= 0) {
        ssize_t now = write(out, outbox + sent, out_end - sent);
        if (now <= 0) break; /* the gateway is gone: it will ask again */
        sent += (size_t)now;
    }
    out_end = 0;
}

/* The next gateway, where there is a socket. */
static int reconnect(void) {
    if (listener < 0) return -1;
    if (in >= 0) close(in);
    in = out = accept(listener, NULL, NULL);
    if (in < 0) fail("accept");
    return 0;
}

int nst_board_getc(void) {
    while (in_next == in_end) {
        flush();
        ssize_t got = in < 0 ? 0 : read(in, inbox, sizeof inbox);
        if (got <= 0) {
            if (reconnect()) return -1;
            continue;
        }
        in_next = 0;
        in_end = (size_t)got;
    }
    return inbox[in_next++];
}

void nst_board_putc(uint8_t byte) {
    if (out_end == sizeof outbox) flush();
    if (out >= 0) outbox[out_end++] = byte;
}

uint32_t nst_board_ticks(void) { return ticks++; }

const void *nst_board_data(uint32_t *bytes) {
    *bytes = blob_bytes;
    return blob;
}

void *nst_board_region(uint32_t *bytes) {
    *bytes = region_bytes;
    return region;
}

uint32_t nst_board_stack(uint32_t *reserved) {
    *reserved = 0; /* this machine's is not painted */
    return 0;
}

static void open_blob(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail(path);
    long size = ftell(file);
    rewind(file);
    blob = malloc((size_t)size);
    if (!blob || fread(blob, 1, (size_t)size, file) != (size_t)size) fail(path);
    fclose(file);
    blob_bytes = (uint32_t)size;
}

static void listen_at(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) fail("the socket's path is too long");
    strcpy(address.sun_path, path);
    unlink(path);
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 1)) fail(path);
}

int main(int count, char **words) {
    static nst_node node;
    for (int k = 1; k + 1 < count; k += 2) {
        if (!strcmp(words[k], "--arena")) region_bytes = (uint32_t)strtoul(words[k + 1], NULL, 0);
        if (!strcmp(words[k], "--blob")) open_blob(words[k + 1]);
        if (!strcmp(words[k], "--socket")) listen_at(words[k + 1]);
    }
    if (!region_bytes) {
        fputs("usage: host --arena BYTES [--blob FILE] [--socket PATH]\n", stderr);
        return 2;
    }
    region = malloc(region_bytes); /* of its own, so that a sanitiser sees the first byte beyond it */
    if (!region) fail("arena");
    if (listener < 0) in = 0, out = 1;
    signal(SIGPIPE, SIG_IGN); /* a gateway may die while it is being answered */
    nst_node_run(&node);
    flush();
    return 0;
}
