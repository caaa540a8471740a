/* A few threads that sleep until there is work. Nobody spins: the daemon and the model's own threads want the same cores.
 *
 * One job at a time; who comes while there is one works alone. The caller takes part, and waits only for items that others have begun:
 * a thread that wakes late costs nothing.
 */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "attention.h"

#define MOST 63 /* threads beside the caller's: more do not share one memory's bandwidth to any use */

typedef struct {
    void (*act)(void *work, int64_t i);
    void *work;
    int64_t count;
    atomic_int_fast64_t next;
} Job;

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* held by who has a job */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all below */
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER, ended = PTHREAD_COND_INITIALIZER;
static Job *job;
static int threads, wanted, working; /* that there are; that may still join the job; that are at it */
static int watching;                 /* whether a fork is looked after */

static void work_at(Job *which)
{
    int64_t i;
    while ((i = atomic_fetch_add_explicit(&which->next, 1, memory_order_relaxed)) < which->count)
        which->act(which->work, i);
}

static void *helper(void *nothing)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!wanted)
            pthread_cond_wait(&begun, &lock);
        Job *mine = job;
        wanted--;
        working++;
        pthread_mutex_unlock(&lock);
        work_at(mine);
        pthread_mutex_lock(&lock);
        if (--working == 0)
            pthread_cond_signal(&ended);
    }
    return nothing;
}

/* A child of a fork has none of the threads, and locks in whatever state they were. */
static void forked(void)
{
    const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    const pthread_cond_t quiet = PTHREAD_COND_INITIALIZER;
    busy = lock = fresh;
    begun = ended = quiet;
    threads = wanted = working = 0;
}

/* Bring the threads to at least `count`, as far as the system gives them. They take no signals: those are for the program's own. */
static void grow(int count)
{
    sigset_t all, before;
    if (!watching)
        watching = pthread_atfork(NULL, NULL, forked) == 0;
    if (!watching || threads >= count)
        return;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (threads < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, helper, NULL))
            break;
        pthread_detach(thread);
        threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pool_run(void (*act)(void *work, int64_t i), void *work, int64_t count, int wished)
{
    Job mine = {act, work, count, 0};
    int64_t helpers = wished < count ? wished - 1 : count - 1;
    if (helpers > MOST)
        helpers = MOST;
    if (helpers < 1 || pthread_mutex_trylock(&busy)) {
        work_at(&mine);
        return;
    }
    pthread_mutex_lock(&lock);
    grow((int)helpers);
    job = &mine;
    wanted = (int)helpers < threads ? (int)helpers : threads;
    for (int i = 0; i < wanted; i++)
        pthread_cond_signal(&begun);
    pthread_mutex_unlock(&lock);
    work_at(&mine);
    pthread_mutex_lock(&lock);
    wanted = 0;
    while (working)
        pthread_cond_wait(&ended, &lock);
    pthread_mutex_unlock(&lock);
    pthread_mutex_unlock(&busy);
}
