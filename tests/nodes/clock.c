/* Loaded into a process, moves its wall clock by as many nanoseconds as the file WALL_CLOCK_FILE holds at the moment.

   What waits until a moment of the wall clock waits until the same moment of the true one. Other clocks stay true. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL
#define NEXT(name) ((typeof(&name))dlsym(RTLD_NEXT, #name))

static volatile int64_t nothing, *ahead = &nothing;

__attribute__((constructor)) static void map_file(void)
{
    const char *path = getenv("WALL_CLOCK_FILE");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        ahead = mapped;
}

static struct timespec moved(struct timespec moment, int64_t by)
{
    int64_t sum = moment.tv_sec * SECOND + moment.tv_nsec + by;
    return (struct timespec){sum / SECOND, sum % SECOND};
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static typeof(&clock_gettime) next;
    if (!next)
        next = NEXT(clock_gettime);
    int failed = next(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *now = moved(*now, *ahead);
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec wall;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &wall);
    now->tv_sec = wall.tv_sec;
    now->tv_usec = wall.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now)
        *now = wall.tv_sec;
    return wall.tv_sec;
}

/* A condition may count by CLOCK_MONOTONIC instead; no machine is up for thirty years. */
static struct timespec truly(const struct timespec *until)
{
    return moved(*until, until->tv_sec > SECOND ? -*ahead : 0);
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    struct timespec moment = truly(until);
    return NEXT(pthread_cond_timedwait)(cond, mutex, &moment);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until)
{
    struct timespec moment = truly(until);
    return NEXT(pthread_mutex_timedlock)(mutex, &moment);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until)
{
    struct timespec moment = truly(until);
    return NEXT(sem_timedwait)(sem, &moment);
}
