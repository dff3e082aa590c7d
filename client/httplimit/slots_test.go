package httplimit_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

var (
	reports = client.Charge{Policy: "reports", Key: "k"}
	render  = client.Charge{Policy: "render", Key: "k", Cost: client.Cost(2)}
)

// A held handler is behind slots: one of reports, two of render, for leases of 10 seconds. It waits for finish, unless that is nil.
type heldHandler struct {
	*clienttest.Fake
	t       *testing.T
	handler http.Handler
	ctx     context.Context // of the last request
	finish  chan func()
	events  []httplimit.Event
}

func newHeld(t *testing.T, failure httplimit.Failure, charges ...client.Charge) *heldHandler {
	l := &heldHandler{Fake: clienttest.New(time.Now), t: t}
	for name, capacity := range map[string]int64{"reports": 1, "render": 2} {
		require.NoError(t, l.DefinePolicy(t.Context(), client.Policy{Name: name, Capacity: capacity, Lease: 10 * time.Second}))
	}
	observe := httplimit.Observe(func(_ *http.Request, e httplimit.Event) { l.events = append(l.events, e) })
	l.handler = httplimit.Slots(l, charge(charges...), failure, observe)(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		l.ctx = r.Context()
		if l.finish != nil {
			(<-l.finish)()
		}
	}))
	return l
}

func (l *heldHandler) get(ctx context.Context) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	l.handler.ServeHTTP(w, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	return w
}

// holders counts them.
func (l *heldHandler) holders() int { return len(noError(l.Holders(context.Background()))(l.t)) }

func TestSlots_AreHeldWhileARequestIsServed(t *testing.T) {
	t.Parallel()
	for name, finish := range map[string]func(){"returns": func() {}, "panics": func() { panic(http.ErrAbortHandler) }} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := newHeld(t, httplimit.Closed(time.Second), render, reports)
				l.finish = make(chan func())
				served := make(chan any)
				go func() {
					defer func() { served <- recover() }()
					l.get(context.Background())
				}()
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Equal(t, 2, l.holders())
				require.NoError(t, l.ctx.Err())

				w := l.get(t.Context())
				require.Equal(t, http.StatusTooManyRequests, w.Code)
				require.Equal(t, "10", w.Header().Get("Retry-After"), "it was renewed just now")
				require.Equal(t, "application/problem+json", w.Header().Get("Content-Type"))
				require.Contains(t, w.Body.String(), `"violated-policies":["render"]`)
				require.Empty(t, w.Header()["Ratelimit"])

				l.finish <- finish
				<-served
				require.Zero(t, l.holders())
				require.Error(t, l.ctx.Err())
				var outcomes []string
				for _, e := range l.events {
					outcomes = append(outcomes, e.Charges[0].Policy+" "+e.Outcome.String())
				}
				require.Equal(t, []string{"render allowed", "reports allowed", "render denied"}, outcomes)
			})
		})
	}
}

// A function of the program that panics costs no slot.
func TestSlots_AreReleasedWhenAFunctionPanics(t *testing.T) {
	t.Parallel()
	panics := func() { panic(http.ErrAbortHandler) }
	for name, opts := range map[string][]httplimit.Option{
		"Observe":    {httplimit.Observe(func(*http.Request, httplimit.Event) { panics() })},
		"RefuseWith": {httplimit.RefuseWith(func(http.ResponseWriter, *http.Request, httplimit.Event) { panics() })},
	} {
		l := newHeld(t, httplimit.Closed(time.Second), reports)
		handler := httplimit.Slots(l, charge(reports, reports), httplimit.Closed(time.Second), opts...)(http.NotFoundHandler()) // the second is denied
		require.PanicsWithValue(t, http.ErrAbortHandler, func() {
			handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		}, name)
		require.Zero(t, l.holders(), name)
	}
}

func TestSlots_ADenialReleasesTheOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newHeld(t, httplimit.Closed(time.Second), render, reports)
		other, _, err := l.Hold(t.Context(), "reports", "k")
		require.NoError(t, err)
		require.Equal(t, http.StatusTooManyRequests, l.get(t.Context()).Code)
		require.Equal(t, 1, l.holders())
		require.NoError(t, other.Release(t.Context()))
		require.Equal(t, http.StatusOK, l.get(t.Context()).Code)
		require.NoError(t, l.DefinePolicy(t.Context(), client.Policy{Name: "render", Capacity: 1}))
		w := l.get(t.Context())
		require.Equal(t, http.StatusTooManyRequests, w.Code)
		require.NotContains(t, w.Header(), "Retry-After", "never")
		require.Zero(t, l.holders())
	})
}

func TestSlots_TheRequestEndsWithItsLease(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newHeld(t, httplimit.Closed(time.Second), reports)
		l.finish = make(chan func(), 1)
		l.finish <- func() {
			l.FailAll(errors.New("no connection"))
			<-l.ctx.Done()
			require.ErrorIs(t, context.Cause(l.ctx), client.ErrLeaseLost)
			require.ErrorContains(t, context.Cause(l.ctx), "no connection")
		}
		require.Equal(t, http.StatusOK, l.get(t.Context()).Code)
	})
}

// A silentHolder has no answer before its ctx ends.
type silentHolder struct{ late *client.Limiter }

func (s silentHolder) Hold(ctx context.Context, policy, key string, opts ...client.CallOption) (*client.Hold, client.HoldDecision, error) {
	<-ctx.Done()
	if s.late != nil {
		return s.late.Hold(context.WithoutCancel(ctx), policy, key, opts...)
	}
	return nil, client.HoldDecision{}, ctx.Err()
}

// The timeout bounds the call, and a grant that comes too late is given back.
func TestSlots_WaitNoLongerThanTheTimeout(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newHeld(t, httplimit.Closed(time.Second), reports)
		for _, silent := range []silentHolder{{}, {l.Limiter}} {
			var event httplimit.Event
			limit := httplimit.Slots(silent, charge(reports), httplimit.Closed(time.Second), httplimit.Observe(func(_ *http.Request, e httplimit.Event) { event = e }))
			begin := time.Now()
			w := httptest.NewRecorder()
			limit(l.handler).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
			require.Equal(t, http.StatusServiceUnavailable, w.Code)
			require.Equal(t, time.Second, time.Since(begin))
			require.ErrorIs(t, event.Err, context.DeadlineExceeded)
			require.Zero(t, l.holders())
		}
	})
}
