package main

import (
	"context"
	"slices"
	"sync"
	"time"
)

// An offer is callers who arrive at a rate, whether or not earlier ones are answered, and who wait no longer than a deadline.
type offer struct {
	keys      *keyspace
	acquire   acquirer
	perSecond float64
	deadline  time.Duration
	warm      time.Duration // their rate rises, so that connections are opened one by one; callers of this time are not counted
	during    time.Duration
}

// due is how many callers have arrived after a while.
func (o offer) due(after time.Duration) int {
	rising := min(after, o.warm).Seconds()
	full := (after - o.warm).Seconds()
	arrived := max(0, full) * o.perSecond
	if o.warm > 0 {
		arrived += rising * rising / 2 / o.warm.Seconds() * o.perSecond
	}
	return int(arrived)
}

// The metrics of an offer.
const (
	best    = "best"    // answers per second that callers got who wait for each
	offered = "offered" // callers per second
	late    = "late"    // of these, without an answer before their deadline
	refused = "refused" // of these, told before it that there would be none
)

// run returns when all callers have an answer. Rate counts those who were granted before their deadline.
func (o offer) run(ctx context.Context) sample {
	var (
		mu      sync.Mutex
		times   []time.Duration
		failed  = map[string]float64{late: 0, refused: 0}
		sent    float64
		callers sync.WaitGroup
	)
	next := o.keys.from(1)
	start := time.Now()
	warm := start.Add(o.warm)
	send := func(begin time.Time) {
		key := next()
		callers.Go(func() {
			ctx, cancel := context.WithDeadline(ctx, begin.Add(o.deadline))
			defer cancel()
			err := o.acquire(ctx, key)
			took := time.Since(begin)
			if begin.Before(warm) {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			sent++
			switch {
			case err == nil && took <= o.deadline:
				times = append(times, took)
			case err == nil || ctx.Err() != nil:
				failed[late]++
			default:
				failed[refused]++
			}
		})
	}
	for arrived := 0; ; {
		now := time.Now()
		if now.After(warm.Add(o.during)) || ctx.Err() != nil {
			break
		}
		for due := o.due(now.Sub(start)); arrived < due; arrived++ {
			send(now)
		}
		_ = pause(ctx, time.Millisecond)
	}
	callers.Wait()
	slices.Sort(times)
	seconds := o.during.Seconds()
	return sample{
		rate: float64(len(times)) / seconds, offered: sent / seconds, late: failed[late] / sent, refused: failed[refused] / sent,
		p50: quantile(times, 0.50), p99: quantile(times, 0.99),
	}
}
