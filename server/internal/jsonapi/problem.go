package jsonapi

import (
	"errors"
	"net/http"

	"github.com/go-json-experiment/json"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// A Problem is an error as RFC 9457 has it.
type Problem struct {
	Title    string `json:"title"`
	Status   int    `json:"status"`
	Detail   string `json:"detail,omitempty"`
	Hint     string `json:"hint,omitempty"`
	SQLState string `json:"sqlstate,omitempty"`
}

// NewProblem tells of an error what callers may know.
func NewProblem(err error) Problem {
	var e *service.Error
	if !errors.As(err, &e) {
		return Problem{Title: "internal error", Status: http.StatusInternalServerError}
	}
	return Problem{Title: e.Message, Status: e.Kind.Status(), Detail: e.Detail, Hint: e.Hint, SQLState: e.SQLState}
}

// Write answers with the problem.
func (p Problem) Write(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/problem+json")
	if p.Status == http.StatusServiceUnavailable {
		w.Header().Set("Retry-After", "1")
	}
	w.WriteHeader(p.Status)
	text, _ := json.Marshal(p)         // it has no value that could fail
	_, _ = w.Write(append(text, '\n')) // who has left needs no answer
}
