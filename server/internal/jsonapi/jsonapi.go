// Package jsonapi is the service as JSON over HTTP, for people with curl and for languages without gRPC.
package jsonapi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/auth"
	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// An api has the calls of a service, below /v1/.
type api struct {
	mux      *http.ServeMux
	service  *service.Service
	maxBytes int64
	names    []string // of the calls
}

// Register adds s to mux. maxBytes bounds a request.
func Register(mux *http.ServeMux, s *service.Service, maxBytes int64) {
	a := &api{mux: mux, service: s, maxBytes: maxBytes}
	a.handle(service.Acquire, newDecision, "policy key cost idempotency_key")
	a.handle(service.AcquireAll, newJointDecision, "charges idempotency_key", "policy key cost")
	a.handle(service.AcquireMany, newAnswers, "requests", "policy key cost idempotency_key")
	a.handle(service.AcquireUpTo, newPartialDecision, "policy key at_most at_least idempotency_key")
	a.handle(service.Reserve, newReservation, "policy key cost idempotency_key max_wait")
	a.handle(service.Charge, newDecision, "policy key cost idempotency_key")
	a.handle(service.Settle, newDecision, "policy key cost idempotency_key")
	a.handle(service.SettleAll, newJointSettlement, "settlements idempotency_key", "policy key cost")
	a.handle(service.Peek, newDecision, "policy key cost")
	a.handle(service.Refund, newDecision, "policy key amount")
	a.handle(service.Pause, newDecision, "policy key pause_for")
	a.handle(service.Hold, newHoldDecision, "policy key holder cost")
	a.handle(service.Renew, newRenewal, "policy key holder")
	a.handle(service.Release, newRelease, "policy key holder")
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		Problem{Title: "there is nothing here", Status: http.StatusNotFound, Detail: "The calls are POST /v1/" + strings.Join(a.names, ", ") + ". GET has /livez, /healthz and /metrics."}.Write(w)
	})
}

// fields are those of a request, by their names in JSON. A call knows some of them.
var fields = map[string]func(*service.Request) any{
	"policy":          func(r *service.Request) any { return &r.Policy },
	"key":             func(r *service.Request) any { return &r.Key },
	"cost":            func(r *service.Request) any { return &r.Cost },
	"at_most":         func(r *service.Request) any { return &r.Cost },
	"amount":          func(r *service.Request) any { return &r.Cost },
	"at_least":        func(r *service.Request) any { return &r.AtLeast },
	"idempotency_key": func(r *service.Request) any { return &r.IdempotencyKey },
	"holder":          func(r *service.Request) any { return &r.Holder },
	"max_wait":        func(r *service.Request) any { return &r.Time },
	"pause_for":       func(r *service.Request) any { return &r.Time },
	"charges":         func(r *service.Request) any { return &r.List },
	"requests":        func(r *service.Request) any { return &r.List },
	"settlements":     func(r *service.Request) any { return &r.List },
}

// readRequest reads a request with these names: its own, and those of the requests in its list.
func readRequest(names []string) *json.Unmarshalers {
	return json.UnmarshalFromFunc(func(from *jsontext.Decoder, to *service.Request) error {
		if from.PeekKind() != '{' {
			return errors.ErrUnsupported
		}
		*to = service.Request{}
		known := strings.Fields(names[min(1, from.StackDepth())])
		_, _ = from.ReadToken() // the brace
		for from.PeekKind() != '}' {
			name, err := from.ReadToken()
			if err != nil {
				return err
			}
			if !slices.Contains(known, name.String()) {
				return json.ErrUnknownName
			}
			if err := json.UnmarshalDecode(from, fields[name.String()](to)); err != nil {
				return err
			}
		}
		_, err := from.ReadToken()
		return err
	})
}

// readTime reads a time in seconds.
var readTime = json.UnmarshalFromFunc(func(from *jsontext.Decoder, to *service.Time) error {
	var seconds float64
	if err := json.UnmarshalDecode(from, &seconds); err != nil {
		return err
	}
	if math.Abs(seconds) > service.MaxTime {
		*to = service.Time{Text: strconv.FormatFloat(seconds, 'g', -1, 64) + " seconds"}
	} else {
		*to = service.Time{Duration: time.Duration(math.Round(1e6*seconds)) * time.Microsecond}
	}
	return nil
})

// handle adds a call: it reads a request, of which it knows these names, and writes the answer or a [Problem].
func (a *api) handle(operation service.Operation, convert func(service.Answer) any, names ...string) {
	a.names = append(a.names, string(operation))
	// It rejects what encoding/json changes, and so would charge to another bucket: invalid UTF-8, lone surrogates, duplicate names, more text.
	read := json.JoinOptions(json.RejectUnknownMembers(true),
		json.WithUnmarshalers(json.JoinUnmarshalers(wholeNumbers, readTime, readRequest(names))))
	a.mux.HandleFunc("/v1/"+string(operation), func(w http.ResponseWriter, r *http.Request) {
		body, ok := ReadPost(w, r, a.maxBytes)
		if !ok {
			return
		}
		var q service.Request
		if err := json.Unmarshal(body, &q, read); err != nil {
			Unreadable(err).Refuse(w, r)
			return
		}
		unread, err := a.service.ReserveAnswer(nil, service.Size{Operation: operation, Elements: len(q.List), Bytes: len(body)})
		if err != nil {
			NewProblem(err).Write(w)
			return
		}
		defer unread.Done()
		var text []byte
		answer, err := a.service.Do(r.Context(), operation, q)
		if err == nil {
			text, err = json.Marshal(convert(answer))
		}
		if err != nil {
			NewProblem(err).Write(w)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(text, '\n')) // an error here means that the client has hung up
	})
}

// wholeNumbers reads whole numbers in every form that JSON has: 1, 1.0 and 10e-1.
var wholeNumbers = json.UnmarshalFromFunc(func(from *jsontext.Decoder, to *int64) error {
	if from.PeekKind() != '0' {
		return errors.ErrUnsupported
	}
	value, err := from.ReadValue()
	if err != nil {
		return err
	}
	n, isWhole := whole(string(value))
	if !isWhole {
		return fraction(value.String())
	}
	*to = n
	return nil
})

// whole returns a number of JSON, unless it has a fraction or more than 64 bits.
func whole(text string) (n int64, isWhole bool) {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	before, after, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimRight(before+after, "0")
	if strings.Trim(digits, "-0") == "" {
		return 0, true
	}
	shift, err := strconv.Atoi(cmp.Or(exponent, "0"))
	zeros := len(before) + shift - len(digits)
	if err != nil || zeros < 0 || zeros > 18 {
		return 0, false
	}
	n, err = strconv.ParseInt(digits+strings.Repeat("0", zeros), 10, 64)
	return n, err == nil
}

// A fraction is a number that is not whole, or too large.
type fraction string

func (f fraction) Error() string { return "a whole number is needed" }

// ReadPost returns the body of a POST. If ok is false, the response has been written.
func ReadPost(w http.ResponseWriter, r *http.Request, maxBytes int64) (body []byte, ok bool) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		Problem{Title: "the method is not POST", Status: http.StatusMethodNotAllowed}.Refuse(w, r)
		return nil, false
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBytes))
	if err != nil {
		Unreadable(err).Refuse(w, r)
	}
	return body, err == nil
}

// Unreadable returns the Problem of a request that could not be read or decoded.
func Unreadable(err error) Problem {
	if tooLarge, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return Problem{Title: "the request is too large", Status: http.StatusRequestEntityTooLarge, Detail: fmt.Sprintf("The limit is %d bytes.", tooLarge.Limit)}
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return Problem{Title: "the request did not arrive in time", Status: http.StatusRequestTimeout}
	}
	if number, ok := errors.AsType[fraction](err); ok {
		return NewProblem(invalidNumber(err, number))
	}
	return Problem{Title: "the request is not the JSON object of this call", Status: http.StatusBadRequest, Detail: whatIsWrong(err)}
}

// invalidNumber names the argument, such as cost, or requests[1].cost.
func invalidNumber(err error, number fraction) *service.Error {
	var semantic *json.SemanticError
	errors.As(err, &semantic)
	path, name := "", ""
	for name = range semantic.JSONPointer.Tokens() {
		if _, err := strconv.Atoi(name); err == nil {
			path += "[" + name + "]"
		} else {
			path += "." + name
		}
	}
	return service.Invalid("invalid "+name, fmt.Sprintf("%s is %s.", strings.TrimPrefix(path, "."), string(number)), "Send a whole number below 2^63.")
}

// whatIsWrong describes a decoding error without the names of Go.
func whatIsWrong(err error) string {
	var semantic *json.SemanticError
	if !errors.As(err, &semantic) {
		return strings.TrimPrefix(err.Error(), "jsontext: ")
	}
	if errors.Is(err, json.ErrUnknownName) {
		return fmt.Sprintf("%s: this call knows no such name.", semantic.JSONPointer)
	}
	wanted := "an object"
	switch semantic.GoType.Kind() {
	case reflect.Int64:
		wanted = "a whole number"
	case reflect.Float64:
		wanted = "a number"
	case reflect.String:
		wanted = "text"
	case reflect.Slice:
		wanted = "an array"
	}
	return fmt.Sprintf("%s: this must be %s.", cmp.Or(string(semantic.JSONPointer), "/"), wanted)
}

// Guard rejects requests without one of the tokens.
func Guard(tokens auth.Tokens, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !tokens.Admit(r.Header.Values("Authorization")) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			Problem{Title: "no token that the server knows", Status: http.StatusUnauthorized, Detail: "Send the header Authorization: Bearer …"}.Refuse(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// UnderNoName rejects requests whose Host is neither an address nor localhost. Another site can point its name to this machine: a
// browser then treats the requests of its pages as same-origin, and they could empty every bucket.
func UnderNoName(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "" && !auth.IsAddress(r.Host) { // a browser's has one
			Problem{Title: "the server is asked under a name", Status: http.StatusForbidden,
				Detail: fmt.Sprintf("Host is %q. Without TOKENS a server of this machine answers at localhost or at an address only: use one, or set TOKENS.", r.Host)}.Refuse(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// timeoutHeader is the time that a caller waits, in seconds, like a deadline of gRPC.
const timeoutHeader = "Request-Timeout"

// Timeout ends the work for a request when its caller stops waiting.
func Timeout(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text := r.Header.Get(timeoutHeader)
		if text == "" {
			next.ServeHTTP(w, r)
			return
		}
		seconds, err := strconv.ParseFloat(text, 64)
		if err != nil || !(seconds > 0 && seconds < service.MaxTime) {
			Problem{Title: "the time cannot be read", Status: http.StatusBadRequest, Detail: timeoutHeader + " is in seconds, more than 0 and less than 1000000000, without a unit, such as 0.25."}.Refuse(w, r)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), time.Duration(seconds*float64(time.Second)))
		defer cancel()
		next.ServeHTTP(w, r.WithContext(ctx))
	})
}

// A Problem is an error in the form of RFC 9457.
type Problem struct {
	Title    string `json:"title"`
	Status   int    `json:"status"`
	Detail   string `json:"detail,omitempty"`
	Hint     string `json:"hint,omitempty"`
	SQLState string `json:"sqlstate,omitempty"`
}

// NewProblem returns what callers may know of an error.
func NewProblem(err error) Problem {
	var e *service.Error
	if !errors.As(err, &e) {
		return Problem{Title: "internal error", Status: http.StatusInternalServerError}
	}
	return Problem{Title: e.Message, Status: e.Kind.Status, Detail: e.Detail, Hint: e.Hint, SQLState: e.SQLState}
}

// Write writes the problem as the response.
func (p Problem) Write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/problem+json")
	if p.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(p.Status)
	text, _ := json.Marshal(p)         // it has no value that could fail
	_, _ = w.Write(append(text, '\n')) // an error here means that the client has hung up
}

type observer struct{}

// Observed returns a context for the requests of a listener: s observes those that [Problem.Refuse] refuses.
func Observed(s *service.Service) context.Context {
	return context.WithValue(context.Background(), observer{}, s)
}

// Refuse writes the problem of a request that the service does not get.
func (p Problem) Refuse(w http.ResponseWriter, r *http.Request) {
	if s, isObserved := r.Context().Value(observer{}).(*service.Service); isObserved {
		s.Refuse(p.Status, r.URL.Path, r.RemoteAddr)
	}
	p.Write(w)
}

// A Decision is client.Decision in JSON: times are seconds, and null for never.
type Decision struct {
	Allowed    bool     `json:"allowed"`
	Remaining  int64    `json:"remaining"`
	RetryAfter *Seconds `json:"retry_after"`
	ResetAfter *Seconds `json:"reset_after"`
	Capacity   int64    `json:"capacity"`
	Replayed   bool     `json:"replayed"`
	Shadowed   bool     `json:"shadowed"`
	Estimated  bool     `json:"estimated,omitzero"` // there only where it is true
}

// NewDecision converts d.
func NewDecision(d client.Decision) Decision {
	j := Decision{Allowed: d.Allowed, Remaining: d.Remaining, Capacity: d.Capacity, Replayed: d.Replayed, Shadowed: d.Shadowed, Estimated: d.Estimated}
	if !d.Never() {
		j.RetryAfter = (*Seconds)(&d.RetryAfter)
	}
	if !d.NeverFull() {
		j.ResetAfter = (*Seconds)(&d.ResetAfter)
	}
	return j
}

func newDecision(a service.Answer) any { return NewDecision(a.Decision) }

func newPartialDecision(a service.Answer) any {
	return struct {
		Decision
		Taken int64 `json:"taken"`
	}{NewDecision(a.Decision), a.Taken}
}

func newReservation(a service.Answer) any {
	d := NewDecision(a.Decision)
	return struct {
		Allowed    bool     `json:"allowed"`
		Wait       *Seconds `json:"wait"`
		Remaining  int64    `json:"remaining"`
		ResetAfter *Seconds `json:"reset_after"`
		Capacity   int64    `json:"capacity"`
		Replayed   bool     `json:"replayed"`
		Shadowed   bool     `json:"shadowed"`
	}{d.Allowed, d.RetryAfter, d.Remaining, d.ResetAfter, d.Capacity, d.Replayed, d.Shadowed}
}

func newHoldDecision(a service.Answer) any {
	d := NewDecision(a.Decision)
	return struct {
		Allowed    bool     `json:"allowed"`
		Remaining  int64    `json:"remaining"`
		RetryAfter *Seconds `json:"retry_after"`
		HeldFor    Seconds  `json:"held_for"`
		Capacity   int64    `json:"capacity"`
		Renewed    bool     `json:"renewed"`
		Shadowed   bool     `json:"shadowed"`
	}{d.Allowed, d.Remaining, d.RetryAfter, Seconds(a.HeldFor), d.Capacity, d.Replayed, d.Shadowed}
}

func newRenewal(a service.Answer) any {
	if !a.Allowed {
		return map[string]*Seconds{"held_for": nil} // it does not hold
	}
	return map[string]*Seconds{"held_for": (*Seconds)(&a.HeldFor)}
}

func newRelease(a service.Answer) any { return map[string]bool{"released": a.Allowed} }

// An answer has a decision or an error.
type answer struct {
	Decision *Decision `json:"decision,omitzero"`
	Error    *Problem  `json:"error,omitzero"`
}

func newAnswers(a service.Answer) any {
	all := make([]answer, len(a.Answers))
	for i, a := range a.Answers {
		if a.Err != nil {
			all[i].Error = new(NewProblem(a.Err))
		} else {
			all[i].Decision = new(NewDecision(a.Decision))
		}
	}
	return map[string][]answer{"answers": all}
}

func newJointDecision(a service.Answer) any {
	return struct {
		Decision
		Binding   int        `json:"binding"`
		Decisions []Decision `json:"decisions"`
	}{NewDecision(a.Decision), a.Binding, newDecisions(a.Decisions)}
}

func newJointSettlement(a service.Answer) any {
	return struct {
		Replayed  bool       `json:"replayed"`
		Decisions []Decision `json:"decisions"`
	}{a.Replayed, newDecisions(a.Decisions)}
}

func newDecisions(list []client.Decision) []Decision {
	all := make([]Decision, len(list))
	for i, d := range list {
		all[i] = NewDecision(d)
	}
	return all
}

// Seconds is a time in whole microseconds, written exactly as a number of seconds.
type Seconds time.Duration

// MarshalJSON writes as few digits as possible.
func (s Seconds) MarshalJSON() ([]byte, error) {
	whole, micros := s/Seconds(time.Second), s%Seconds(time.Second)/Seconds(time.Microsecond)
	text := strconv.AppendInt(nil, int64(whole), 10)
	if micros == 0 {
		return text, nil
	}
	point := len(text)
	text = strconv.AppendInt(text, 1_000_000+int64(micros), 10) // a 1, and six digits
	text[point] = '.'
	for text[len(text)-1] == '0' {
		text = text[:len(text)-1]
	}
	return text, nil
}

// ScanInterval reads an interval of the database without months, which may be longer than a [time.Duration].
func (s *Seconds) ScanInterval(interval pgtype.Interval) error {
	const most = math.MaxInt64 / int64(time.Microsecond)
	days := min(int64(interval.Days), most/(24*time.Hour).Microseconds())
	micros := days*(24*time.Hour).Microseconds() + min(interval.Microseconds, most-days*(24*time.Hour).Microseconds())
	*s = Seconds(time.Duration(micros) * time.Microsecond)
	return nil
}
