package page

import (
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

const (
	// sampleEvery is how much time a point of a plot stands for.
	sampleEvery = 5 * time.Second

	// samples are kept of each result: ten minutes.
	samples = 120

	// minute is so many of them.
	minute = int(time.Minute / sampleEvery)
)

// results are those that have a plot, in this order.
var results = [...]client.Result{
	client.ResultAllowed, client.ResultDenied, client.ResultReplayed, client.ResultShadowed, client.ResultError,
}

// A tally is how many requests had each of the results, ever.
type tally [len(results)]int64

// A history is how many requests a second had which result, over the last minutes. It takes up a few kilobytes, whatever
// is asked.
type history struct {
	mu    sync.Mutex
	begun time.Time // of the sample that is being counted
	seen  tally
	rates [samples][len(results)]float64 // a ring
	taken int                            // so many samples, ever
}

// sample ends a sample now.
func (h *history) sample(now time.Time, counts tally) {
	h.mu.Lock()
	defer h.mu.Unlock()
	elapsed := now.Sub(h.begun)
	if elapsed <= 0 { // the clock was set back
		h.begun = now
		return
	}
	rates := &h.rates[h.taken%samples]
	for i := range results {
		rates[i] = float64(counts[i]-h.seen[i]) / elapsed.Seconds()
	}
	h.seen, h.begun = counts, now
	h.taken++
}

// of is the rates of a result, the oldest first.
func (h *history) of(result int) []float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var rates []float64
	for n := max(0, h.taken-samples); n < h.taken; n++ {
		rates = append(rates, h.rates[n%samples][result])
	}
	return rates
}

// errorShare is the part of the requests of the last minute that ended in an error.
func (h *history) errorShare() float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var failed, all float64
	for n := max(0, h.taken-minute); n < h.taken; n++ {
		for i, rate := range h.rates[n%samples] {
			all += rate
			if results[i] == client.ResultError {
				failed += rate
			}
		}
	}
	if all == 0 {
		return 0
	}
	return failed / all
}
