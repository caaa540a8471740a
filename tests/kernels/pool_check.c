/* Drives kernels/cpu/pool.c, for ThreadSanitizer: every item is done once, before the call returns. With a word, one caller and its
 * fork, whose items need two threads to end; without, several callers at once.
 */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "attention.h"

#define ITEMS 50
#define CALLS 2000

typedef struct {
    int done[ITEMS]; /* plain numbers: who reads them after the call must see them all */
} Items;

static void act(void *work, int64_t i)
{
    ((Items *)work)->done[i]++;
    if (i % 8 == 0)
        sched_yield();
}

/* Item 0 ends once item 1 has begun, in another thread therefore. */
static void act_together(void *work, int64_t i)
{
    atomic_int *begun = work;
    if (i == 1)
        atomic_store(begun, 1);
    while (!atomic_load(begun))
        sched_yield();
}

static void together(int calls)
{
    for (int call = 0; call < calls; call++) {
        atomic_int begun = 0;
        pool_run(act_together, &begun, 2, 2);
    }
}

static void *caller(void *threads)
{
    for (int call = 0; call < CALLS; call++) {
        Items items = {{0}};
        const int64_t count = call % ITEMS;
        pool_run(act, &items, count, (int)(intptr_t)threads);
        for (int i = 0; i < ITEMS; i++)
            if (items.done[i] != (i < count)) {
                printf("item %d of %d was done %d times\n", i, (int)count, items.done[i]);
                exit(1);
            }
    }
    return NULL;
}

int main(int arguments, char **words)
{
    pthread_t others[2];
    (void)words;
    if (arguments > 1) {
        together(CALLS / 10);
        const pid_t child = fork();
        together(CALLS / 10);
        if (child == 0)
            _exit(0);
        int status = 1;
        return waitpid(child, &status, 0) == child && status == 0 ? 0 : 1;
    }
    for (int i = 0; i < 2; i++)
        pthread_create(&others[i], NULL, caller, (void *)(intptr_t)(2 + i));
    caller((void *)4);
    for (int i = 0; i < 2; i++)
        pthread_join(others[i], NULL);
    return 0;
}
