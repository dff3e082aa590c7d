package page

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

const (
	// sampleEvery is how much time a point of a plot stands for.
	sampleEvery = 5 * time.Second

	// samples are kept of each result: ten minutes.
	samples = 120
)

// results are those that have a plot, in this order.
var results = [...]client.Result{
	client.ResultAllowed, client.ResultDenied, client.ResultReplayed, client.ResultShadowed, client.ResultError,
}

// A History is how many requests a second had which result, over the last minutes. It takes up a few kilobytes, whatever
// is asked.
type History struct {
	counts [len(results)]atomic.Int64

	mu    sync.Mutex
	begun time.Time // of the sample that is being counted
	seen  [len(results)]int64
	rates [samples][len(results)]float64 // a ring
	taken int                            // so many samples, ever
}

// NewHistory returns a History that begins now.
func NewHistory(now time.Time) *History { return &History{begun: now} }

// Count counts a request.
func (h *History) Count(result client.Result) {
	for i := range results {
		if results[i] == result {
			h.counts[i].Add(1)
		}
	}
}

// Sample ends a sample now.
func (h *History) Sample(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	elapsed := now.Sub(h.begun)
	if elapsed <= 0 { // the clock was set back
		h.begun = now
		return
	}
	rates := &h.rates[h.taken%samples]
	for i := range results {
		count := h.counts[i].Load()
		rates[i] = float64(count-h.seen[i]) / elapsed.Seconds()
		h.seen[i] = count
	}
	h.begun = now
	h.taken++
}

// of is the rates of a result, the oldest first.
func (h *History) of(result int) []float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	var rates []float64
	for n := max(0, h.taken-samples); n < h.taken; n++ {
		rates = append(rates, h.rates[n%samples][result])
	}
	return rates
}
