/* A client that is never the limit: sends requests over one connection each, all at once, and reads the responses.

       streams HOST PORT MARK < requests

   Standard input has any number of requests, each a length of four bytes (little-endian) and as many bytes of HTTP. Prints
   one line of JSON when all connections have ended or their last chunk has arrived: the seconds from the first connection
   to the last byte, the events (blank lines of bodies), and the responses whose end contains MARK. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define TAIL 4096
#define READ 65536

struct stream {
    int fd;
    char *request;
    uint32_t length, sent;
    char last; /* the previous byte */
    size_t tail_length;
    char tail[TAIL];
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void keep_tail(struct stream *s, const char *data, size_t n) {
    if (n >= TAIL) {
        memcpy(s->tail, data + n - TAIL, TAIL);
        s->tail_length = TAIL;
        return;
    }
    if (s->tail_length + n > TAIL) {
        size_t kept = TAIL - n;
        memmove(s->tail, s->tail + s->tail_length - kept, kept);
        s->tail_length = kept;
    }
    memcpy(s->tail + s->tail_length, data, n);
    s->tail_length += n;
}

static int ended(const struct stream *s) {
    return s->tail_length >= 7 && !memcmp(s->tail + s->tail_length - 7, "\r\n0\r\n\r\n", 7);
}

int main(int argc, char **argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: streams HOST PORT MARK < requests\n");
        return 2;
    }
    size_t count = 0, room = 0;
    struct stream *streams = NULL;
    uint32_t length;
    while (fread(&length, sizeof length, 1, stdin) == 1) {
        if (count == room && !(streams = realloc(streams, (room = room ? 2 * room : 64) * sizeof *streams))) fail("realloc");
        struct stream *s = &streams[count++];
        memset(s, 0, sizeof *s);
        s->length = length;
        if (!(s->request = malloc(length))) fail("malloc");
        if (fread(s->request, 1, length, stdin) != length) fail("a request is shorter than its length");
    }
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *address;
    if (getaddrinfo(argv[1], argv[2], &hints, &address)) fail("getaddrinfo");
    int poll = epoll_create1(0);
    double began = now();
    for (size_t i = 0; i < count; i++) {
        struct stream *s = &streams[i];
        if ((s->fd = socket(address->ai_family, SOCK_STREAM, 0)) < 0) fail("socket");
        if (connect(s->fd, address->ai_addr, address->ai_addrlen)) fail("connect");
        int one = 1;
        setsockopt(s->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        fcntl(s->fd, F_SETFL, O_NONBLOCK);
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = s};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, s->fd, &event)) fail("epoll_ctl");
    }
    size_t open = count, events = 0, complete = 0;
    static char data[READ];
    while (open) {
        struct epoll_event ready[256];
        int n = epoll_wait(poll, ready, 256, -1);
        for (int i = 0; i < n; i++) {
            struct stream *s = ready[i].data.ptr;
            int is_over = 0;
            if (s->sent < s->length && ready[i].events & EPOLLOUT) {
                ssize_t written = write(s->fd, s->request + s->sent, s->length - s->sent);
                if (written > 0) s->sent += written;
                if (s->sent == s->length) {
                    struct epoll_event event = {.events = EPOLLIN, .data.ptr = s};
                    epoll_ctl(poll, EPOLL_CTL_MOD, s->fd, &event);
                }
            }
            if (ready[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
                ssize_t got = read(s->fd, data, READ);
                if (got > 0) {
                    for (ssize_t at = 0; at < got; at++) {
                        events += data[at] == '\n' && s->last == '\n';
                        s->last = data[at];
                    }
                    keep_tail(s, data, got);
                    is_over = ended(s);
                } else if (got == 0 || errno != EAGAIN) {
                    is_over = 1;
                }
            }
            if (is_over) {
                complete += memmem(s->tail, s->tail_length, argv[3], strlen(argv[3])) != NULL;
                close(s->fd);
                open--;
            }
        }
    }
    printf("{\"seconds\": %.6f, \"events\": %zu, \"complete\": %zu}\n", now() - began, events, complete);
    return 0;
}
